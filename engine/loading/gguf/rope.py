"""Reads the rotary positions of a GGUF file as transformers' settings."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.errors import ConfigError
from engine.loading.gguf.header import Header

_KEYS = ("dimension_count", "dimension_sections", "freq_base", "freq_base_swa", "scale_linear")
_PLAIN_KEYS = {"type", "factor", "finetuned", "original_context_length"}  # that any scaling may have
_YARN_KEYS = {  # names in transformers, by names in the file
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_LOG_KEY = "yarn_log_multiplier"
_SCALE_OF_LOG = {"mistral3": 1, "deepseek2": 10}  # its factor, in architectures that have it
_PARTIAL = {"phi3", "minimax_m2"}  # can rotate a part of a head, but rotate all by default
_OTHER_FACTORS = "rope_freqs.weight has other factors than Llama 3"
_ROUNDING = 1e-5  # of frequencies, relative


def set_positions(config: PretrainedConfig, header: Header) -> None:
    """Set the base of a configuration's rotary positions, how many numbers rotate, and how positions are scaled.

    Raises ConfigError if the file scales them in another way than linearly, by YaRN, longrope or as Llama 3.
    """
    fields = {key: value for key in _KEYS if (value := header.take(f"rope.{key}")) is not None}
    fields |= {f"scaling.{key}": value for key, value in header.take_below("rope.scaling.").items()}
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = parameters.get("full_attention", parameters)  # Gemma scales no other layers
    if not rope:
        return
    if "freq_base" in fields:
        rope["rope_theta"] = fields["freq_base"]
    if "freq_base_swa" in fields and "sliding_attention" in parameters:
        parameters["sliding_attention"]["rope_theta"] = fields["freq_base_swa"]
    _set_dimensions(config, rope, fields.get("dimension_count"))
    try:
        scaling = _scaling(fields, _SCALE_OF_LOG.get(header.architecture, 0)) or _long_scaling(config, fields, header)
        kind = rope.get("rope_type", "default")
        if scaling and kind not in ("default", scaling["rope_type"]):
            raise ConfigError(f"rope.scaling.type is {scaling['rope_type']}")
        if not scaling and kind == "yarn":
            rope["rope_type"] = "default"
        rope.update(scaling)
        factors = _factors(header, "freqs")
        if (factors != 1).any():
            _set_factors(config, rope, factors)
    except ConfigError as error:
        raise ConfigError(
            f"it scales rotary positions in a way that is not supported ({error}); "
            "use a safetensors checkpoint of the model"
        ) from error


def _factors(header: Header, name: str) -> NDArray[np.float64]:
    """Return the numbers that frequencies are divided by: [D / 2], or [1] if the file has none."""
    tensor = header.tensors.get(f"rope_{name}.weight")
    return np.ones(1) if tensor is None else tensor.values().astype(np.float64)


def _set_dimensions(config: PretrainedConfig, rope: dict[str, Any], count: int | None) -> None:
    """Set the share of a head that rotates. count: of numbers; None: all."""
    if count is None:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if count == int(head_dim * rope.get("partial_rotary_factor", 1.0)):
        return
    if "partial_rotary_factor" not in rope and config.model_type not in _PARTIAL:
        raise ConfigError(
            f"it rotates {count} of the {head_dim} numbers of a head; its model in transformers rotates all"
        )
    rope["partial_rotary_factor"] = count / head_dim


def _scaling(fields: Mapping[str, Any], scale_of_log: int) -> dict[str, Any]:
    """Return the scaling that a file names, in transformers' words; {}: none.

    scale_of_log: what the logarithm's factor is to be multiplied by; 0: the architecture has none.
    """
    scaling = {key.removeprefix("scaling."): value for key, value in fields.items() if key.startswith("scaling.")}
    kind, factor = scaling.get("type", "linear"), scaling.get("factor") or fields.get("scale_linear") or 1.0
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"rope.scaling.type is {kind}")
    known = _PLAIN_KEYS | (_YARN_KEYS.keys() if kind == "yarn" else set()) | ({_LOG_KEY} if scale_of_log else set())
    if kind == "longrope" or factor == 1:
        return {}
    if unknown := sorted(scaling.keys() - known):
        raise ConfigError(", ".join(f"rope.scaling.{key}" for key in unknown))
    if kind == "none":
        return {}
    options = {name: scaling[key] for key, name in _YARN_KEYS.items() if key in scaling} if kind == "yarn" else {}
    if _LOG_KEY in scaling:
        options |= dict.fromkeys(("mscale", "mscale_all_dim"), scaling[_LOG_KEY] * scale_of_log)
    return {"rope_type": kind, "factor": factor, **options}


def _long_scaling(config: PretrainedConfig, fields: Mapping[str, Any], header: Header) -> dict[str, Any]:
    """Return the scaling with a factor for each frequency, one set for long texts and one for short; {}: none."""
    factors = {f"{length}_factor": _factors(header, f"factors_{length}").tolist() for length in ("long", "short")}
    if not header.has("rope_factors_long.weight"):
        if fields.get("scaling.type") == "longrope":
            raise ConfigError("rope.scaling.type is longrope, without factors")
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotating = int(size * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)) // 2
    if any(len(numbers) != rotating for numbers in factors.values()):
        raise ConfigError(f"rope_factors_long.weight and rope_factors_short.weight need {rotating} numbers each")
    original = fields.get("scaling.original_context_length", config.max_position_embeddings)
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    if "scaling.attn_factor" in fields:
        scaling["attention_factor"] = fields["scaling.attn_factor"]
    return scaling


def _set_factors(config: PretrainedConfig, rope: dict[str, Any], factors: NDArray[np.float64]) -> None:
    """Set the scaling that divides frequencies by these factors. factors: [D / 2], of falling frequencies."""
    count = len(factors)
    if rope.get("rope_type") == "proportional":  # Gemma 4: its other frequencies are 0
        rotating = int(rope["partial_rotary_factor"] * count)
        if (factors[:rotating] == 1).all() and (factors[rotating:] > 1 / _ROUNDING).all():
            return
    elif rope.get("rope_type") == "default" and rope is config.rope_parameters and factors.min() >= 1 < factors[-1]:
        frequencies = rope["rope_theta"] ** (-np.arange(count) / count)  # [D / 2], in radians per position
        rope.update(_llama3(frequencies, factors))
        actual = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
        if len(actual) == count and np.allclose(actual, frequencies / factors, rtol=_ROUNDING, atol=0):
            return
    raise ConfigError(_OTHER_FACTORS)


def _llama3(frequencies: NDArray[np.float64], factors: NDArray[np.float64]) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling by these factors, if it is that.

    There 1 / factor = s + (1 - s) / F, and s = (original / wavelength - low) / (high - low), from 0 to 1. Only
    original / low and original / high count, so low is 1, as in Llama.
    """
    largest = factors[-1]
    s = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (s > 0) & (s < 1)
    if between.sum() < 2:  # too few for a line
        raise ConfigError(_OTHER_FACTORS)
    slope, offset = np.polyfit(frequencies[between] / (2 * math.pi), s[between], 1).tolist()
    return {
        "rope_type": "llama3",
        "factor": float(largest),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(1 - 1 / offset, 3),
        "original_max_position_embeddings": round(-slope / offset),
    }
