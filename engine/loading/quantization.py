"""Quantised weights through bitsandbytes: which layers have them, in which format, how much memory they take.

NF4 with double quantisation: Dettmers et al., arXiv 2305.14314, section 3. int8 for weights and, per token, for
activations: Dettmers et al., arXiv 2208.07339, section 2, without that paper's outlier columns. Those are chosen over
all tokens of a call, so a text would depend on the other rows of its batch.
"""

import logging
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from decoding.errors import ConfigError

Quantization = Literal["nf4", "int8"]

_BLOCK = 64  # weights that share a scale in NF4
_BYTES = {"nf4": 0.5 + 2 / _BLOCK, "int8": 1.0}  # per weight; the scales of int8 are few


def quantization_config(kind: Quantization, skeleton: PreTrainedModel, device: torch.device) -> BitsAndBytesConfig:
    """Return the configuration for transformers. skeleton: the model on the meta device.

    Raises:
        ConfigError: no layer of the model can be quantised on that device, or bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{kind} needs bitsandbytes: pip install 'consort[quantization]'")
    layers = quantized_weights(kind, skeleton, device)
    if not layers:
        fitting = f" with dimensions that are multiples of {_BLOCK}" if kind == "nf4" and device.type == "cpu" else ""
        raise ConfigError(f"{kind} needs linear layers{fitting}, and {type(skeleton).__name__} has none")
    skipped = [*get_keys_to_not_convert(skeleton), *(set(_linear_weights(skeleton)) - set(layers))]
    # bitsandbytes warns on every call about casts, and on import about an optional kernel
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=skipped,
    )


def quantized_weights(kind: Quantization, skeleton: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    """Return the weights to quantise, by layer name. NF4 kernels on CPUs need full blocks in both dimensions."""
    full_blocks = kind == "nf4" and device.type == "cpu"
    return {
        name: weight
        for name, weight in _linear_weights(skeleton).items()
        if not full_blocks or all(size % _BLOCK == 0 for size in weight.shape)
    }


def weight_bytes(skeleton: PreTrainedModel, dtype: torch.dtype, kind: Quantization | None, device: torch.device) -> int:
    """Return how many bytes the weights will take."""
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    quantized = 0
    if kind is not None:
        quantized = sum(weight.numel() for weight in quantized_weights(kind, skeleton, device).values())
    return (total - quantized) * dtype.itemsize + int(quantized * _BYTES[kind or "int8"])


def _linear_weights(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights that transformers would quantise, by layer name: linear layers but the one for logits."""
    kept = get_keys_to_not_convert(skeleton)
    return {
        name: module.weight
        for name, module in skeleton.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }
