"""Reads LoRA weights in peft's format from a folder or the Hub.

Hu et al., arXiv 2106.09685; rank-stabilised scaling: Kalajdzievski, arXiv 2312.03732.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from decoding.errors import ConfigError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NESTED = "adapter"  # where repositories of Uno have both
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_KNOWN_STARTS = {True, False, "gaussian", "eva", "orthogonal"}  # the others change the base's own weights
_HARMLESS = {  # keys that say how it was trained, or that are read here
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("megatron_core", "megatron_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying", "mask_token_id"),
}


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """An adapter's weights."""

    version: str  # digest of its files
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # down [r, in] and up [out, r], scaled, by the path of the linear layer
    mask_token_id: int | None = None  # what it was trained to draft at, if it was; None: at Uno's noise

    @property
    def rank(self) -> int:
        return max(len(down) for down, _ in self.pairs.values())


def read_lora(path: str, revision: str | None = None) -> LoraWeights:
    """Read an adapter on this machine, or from the Hub. path: a folder, or one with a folder `adapter`, or a Hub id.

    Raises ConfigError if it can't be read, or needs what isn't supported; the text names that.
    """
    try:
        folder = _folder(path, revision)
        header, data = (_content(folder / name) for name in (_CONFIG, _WEIGHTS))
        config = _checked_config(header)
        pairs = _pairs(load(data), config)
    except SafetensorError as error:
        raise ConfigError(f"{path!r}: {_WEIGHTS} is damaged: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path!r}: {error}") from error
    return LoraWeights(blake2b(header + data, digest_size=16).hexdigest(), pairs, config.get("mask_token_id"))


def _folder(path: str, revision: str | None) -> Path:
    folder = Path(path) if Path(path).is_dir() else _download(path, revision)
    nested = folder / _NESTED
    return nested if not (folder / _CONFIG).exists() and nested.is_dir() else folder


def _download(path: str, revision: str | None) -> Path:
    files = [f"{prefix}{name}" for prefix in ("", f"{_NESTED}/") for name in (_CONFIG, _WEIGHTS)]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=files))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(f"there is no such folder, and it can't be had from the Hub: {error}") from error


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"it has no {file.name}; save it as peft does, in safetensors") from error
    except OSError as error:
        raise ConfigError(f"can't read {file.name}: {error}") from error


def _checked_config(header: bytes) -> dict[str, Any]:
    """Return the configuration; raises ConfigError if it asks for more than low-rank products."""
    try:
        config = json.loads(header)
    except ValueError as error:
        raise ConfigError(f"{_CONFIG} is no JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{_CONFIG} is of no LoRA adapter; only those can be stacked")
    if config.get("use_dora"):
        raise ConfigError("it is a DoRA (use_dora), which needs the base's weights; merge it, by the key `adapter`")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"it has biases (bias: {config['bias']}), which are not supported; merge it")
    if config.get("init_lora_weights", True) not in _KNOWN_STARTS:
        raise ConfigError(
            f"it began as {config['init_lora_weights']!r}, which changed the base's weights; convert it to plain LoRA"
        )
    for key, value in config.items():
        if value and key not in _HARMLESS and key not in ("bias", "init_lora_weights"):
            raise ConfigError(f"it needs {key}, which is not supported; merge it, by the key `adapter`")
    return config


def _pairs(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(tensors):
        path = name.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP)
        if not name.startswith(_PREFIX) or not name.endswith((_DOWN, _UP)):
            raise ConfigError(f"it has the tensor {name!r}, which is no part of a linear layer's LoRA; merge it")
        down, up = (tensors.get(f"{_PREFIX}{path}{suffix}") for suffix in (_DOWN, _UP))
        if down is None or up is None or down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise ConfigError(f"{_WEIGHTS} lacks a part of {path}, or its parts don't fit together; copy it again")
        pairs[path] = down, up.float() * _scale(path, len(down), config)
    if not pairs:
        raise ConfigError(f"{_WEIGHTS} has no weights")
    return pairs


def _scale(path: str, rank: int, config: Mapping[str, Any]) -> float:
    alpha = float(config.get("lora_alpha", 8))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", path):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
