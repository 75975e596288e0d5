"""Reads the tensors and the configuration of heads from a folder or the Hub, and says what such files have."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from decoding.errors import ConfigError
from engine.heads.spec import HeadsSpec

_TENSORS = ("*.safetensors", "*.pt", "*.bin", "*.pth")  # files, the preferred first; the others are pickles
_SHOWN = 4
# What a file in the format of speculators says of the layers, of their configuration in transformers.
_LAYER_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    "attention_bias", "mlp_bias", "layer_types", "sliding_window",
)  # fmt: skip


class HeadsCheckpoint(NamedTuple):
    """What a folder has: tensors by name, and config.json, which may be empty."""

    spec: HeadsSpec
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the key and the path."""
        return heads_error(self.spec, problem)

    def check_names(self, expected: Iterable[str], *, ignored: Collection[str] = ()) -> None:
        """Raise ConfigError if tensors are missing or surplus."""
        wanted = set(expected)
        for names, problem in (
            (wanted - set(self.tensors), "lacks"),
            (set(self.tensors) - wanted - set(ignored), "has tensors that do not belong there:"),
        ):
            if names:
                shown = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
                raise self.error(f"{problem} {shown}")

    def check_shape(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; raise ConfigError unless it has this shape."""
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise self.error(f"{name} has the shape {list(tensor.shape)}, but this target needs {list(shape)}")
        return tensor

    def sort_drafted(self, vocab_size: int) -> Tensor:
        """Let the offsets `d2t`, [W], be those of rising tokens, and return the order of outputs that takes, [W].

        Raises ConfigError if they name tokens twice, or outside the target's vocabulary.
        """
        outputs = torch.arange(len(self.tensors["d2t"]))
        drafted, order = (outputs + self.tensors["d2t"].long()).sort()
        if not 0 <= int(drafted[0]) <= int(drafted[-1]) < vocab_size:
            raise self.error(f"d2t names tokens outside the target's vocabulary of {vocab_size}")
        if not (drafted[1:] > drafted[:-1]).all():
            raise self.error("d2t names a token twice")
        self.tensors["d2t"] = drafted - outputs
        return order

    def fill(self, head: nn.Module, vocab_size: int, *, outputs: Collection[str], ignored: Collection[str]) -> None:
        """Give a head on the meta device its tensors, those of its outputs in the order of rising tokens.

        outputs: tensors with a row for each token that can be drafted. ignored: that files may have, and no head needs.

        Raises ConfigError if a tensor is missing, surplus or of another size, or as `sort_drafted` does.
        """
        tensors, shapes = self.tensors, {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        if "d2t" not in tensors and shapes["d2t"] == (vocab_size,):
            tensors["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
        self.check_names(shapes, ignored=ignored)
        for name, shape in shapes.items():
            self.check_shape(name, *shape)
        order = self.sort_drafted(vocab_size)
        if not torch.equal(order, torch.arange(len(order))):
            for name in shapes.keys() & set(outputs):
                tensors[name] = tensors[name][order]
        head.load_state_dict({name: tensors[name] for name in shapes}, assign=True)


def heads_error(spec: HeadsSpec, problem: str) -> ConfigError:
    """Return an error that names the key and the path."""
    return ConfigError(f"{spec.name}.path: {spec.path!r}: {problem}")


def read_checkpoint(spec: HeadsSpec) -> HeadsCheckpoint:
    """Read heads: safetensors, or else a pickle, of which nothing but plain tensors is taken.

    Raises ConfigError if there is no such folder or repository, or it has no file of tensors.
    """
    folder = heads_folder(spec, _TENSORS[:1], _TENSORS[1:])  # pickles are often large, and often beside safetensors
    try:
        tensors = _read_tensors(folder)
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"{spec.name}.path: can't read {spec.path!r}: {error}") from error
    if not tensors:
        raise ConfigError(f"{spec.name}.path: {spec.path!r} has no file of tensors ({', '.join(_TENSORS)})")
    return HeadsCheckpoint(spec, tensors, config)


def heads_folder(spec: HeadsSpec, *choices: Sequence[str]) -> Path:
    """Return the folder with the tensors; raises ConfigError if there is none.

    choices: patterns of files to get from the Hub; the first group that matches any files counts.
    """
    if Path(spec.path).is_dir():
        return Path(spec.path)
    try:
        for patterns in choices:
            wanted = ["config.json", *patterns]
            folder = Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=wanted))
            if any(True for pattern in patterns for _ in folder.glob(pattern)):
                break
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"{spec.name}.path: can't load {spec.path!r}: {error}") from error
    return folder


def is_same(weight: Tensor, layer: nn.Module | None) -> bool:
    """Whether a layer of the target has the same weight."""
    shared: Any = getattr(layer, "weight", None)
    return (
        isinstance(shared, Tensor)
        and shared.shape == weight.shape
        and torch.equal(weight.to(shared.dtype), shared.detach().to(weight.device))
    )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the files of the first kind that there is."""
    files = next((files for pattern in _TENSORS if (files := sorted(folder.glob(pattern)))), [])
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def _read_file(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    loaded = torch.load(file, map_location="cpu", weights_only=True)  # refuses pickles that would run code
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(f"{file.name} should be a dictionary of tensors")
    return {str(name): tensor for name, tensor in loaded.items()}


def drafted_tokens(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return which of the target's tokens a head can draft, [V] bool, as files have it. token_ids: those."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids.cpu(), value=True)


def speculators_config(
    name: str, class_name: str, tokens: int, layers: PretrainedConfig, target: str
) -> dict[str, object]:
    """Return what config.json says of any head in the format of speculators.

    name, class_name: of the kind. tokens: of a usual draft. layers: their configuration. target: its path or Hub id.
    """
    described = layers.to_dict()
    return {
        "architectures": [f"{class_name}Speculator"],
        "speculators_model_type": name,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": target},
        },
        "transformer_layer_config": {key: described[key] for key in _LAYER_KEYS if key in described},
        "torch_dtype": "bfloat16",
    }
