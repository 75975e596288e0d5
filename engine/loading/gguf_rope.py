"""Reads the rotary positions of a GGUF file, which transformers reads in part."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.errors import ConfigError

_PLAIN_KEYS = {"type", "factor", "finetuned", "original_context_length"}  # that any scaling may have
_YARN_KEYS = {  # names in transformers, by names in the file
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_OTHER_FACTORS = "rope_freqs.weight has other factors than Llama 3"
_ROUNDING = 1e-5  # of frequencies, relative


def set_positions(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Set the base of a configuration's rotary positions and their scaling: linear, YaRN, or the factors of Llama 3.

    Raises:
        ConfigError: the file scales them in another way.
    """
    prefix = f"{reader.fields['general.architecture'].contents()}.rope."
    fields = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma scales no other layers
    if "freq_base" in fields:
        rope["rope_theta"] = fields["freq_base"]
    factors = tensors.pop("rope_freqs.weight", np.ones(1)).astype(np.float64)
    try:
        if tensors:
            raise ConfigError(", ".join(sorted(tensors)))
        scaling = _scaling(fields)
        if scaling and rope.get("rope_type") != "default":
            raise ConfigError(f"rope.scaling.type is {scaling['rope_type']}")
        rope.update(scaling)
        if (factors != 1).any():
            _set_factors(config, rope, factors)
    except ConfigError as error:
        raise ConfigError(
            f"it scales rotary positions in a way that is not supported ({error}); "
            "use a safetensors checkpoint of the model"
        ) from error


def _scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling that a file names, in transformers' words; {}: none."""
    scaling = {key.removeprefix("scaling."): value for key, value in fields.items() if key.startswith("scaling.")}
    kind, factor = scaling.get("type", "linear"), scaling.get("factor") or fields.get("scale_linear") or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"rope.scaling.type is {kind}")
    known = _PLAIN_KEYS | (_YARN_KEYS.keys() if kind == "yarn" else set())
    if unknown := sorted(scaling.keys() - known):
        raise ConfigError(", ".join(f"rope.scaling.{key}" for key in unknown))
    if kind == "none" or factor == 1:
        return {}
    options = {name: scaling[key] for key, name in _YARN_KEYS.items() if key in scaling} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **options}


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
