"""Weights of few bits, through bitsandbytes: which layers have them, in which format, and how much memory that takes.

NF4 with double quantisation: Dettmers et al., arXiv 2305.14314, section 3. int8, of weights and, token by token, of
what they are multiplied with: Dettmers et al., arXiv 2208.07339, section 2, but without that paper's outlier columns.
Those are chosen over all tokens of a call, so a text would depend on what it shares a batch with.
"""

import logging
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
    """What transformers needs to know. skeleton: the model without data.

    Raises:
        ConfigError: the model has no layer that could be quantised on that device.
    """
    layers = quantized_weights(kind, skeleton, device)
    if not layers:
        fitting = f" with dimensions that are multiples of {_BLOCK}" if kind == "nf4" and device.type == "cpu" else ""
        raise ConfigError(f"{kind} needs linear layers{fitting}, and {type(skeleton).__name__} has none")
    skipped = [*get_keys_to_not_convert(skeleton), *(set(_linear_weights(skeleton)) - set(layers))]
    # it says on every call that inputs are cast, and on import that an optional kernel is not installed
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
    """By name of their linear layers. On CPUs, kernels for NF4 want whole blocks in both directions."""
    whole_blocks = kind == "nf4" and device.type == "cpu"
    return {
        name: weight
        for name, weight in _linear_weights(skeleton).items()
        if not whole_blocks or all(size % _BLOCK == 0 for size in weight.shape)
    }


def weight_bytes(skeleton: PreTrainedModel, dtype: torch.dtype, kind: Quantization | None, device: torch.device) -> int:
    """How much memory the weights will take."""
    total = sum(parameter.numel() for parameter in skeleton.parameters())
    few_bits = 0
    if kind is not None:
        few_bits = sum(weight.numel() for weight in quantized_weights(kind, skeleton, device).values())
    return (total - few_bits) * dtype.itemsize + int(few_bits * _BYTES[kind or "int8"])


def _linear_weights(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Of the linear layers, by name, that transformers would quantise; not of the last one, which gives the logits."""
    kept = get_keys_to_not_convert(skeleton)
    return {
        name: module.weight
        for name, module in skeleton.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }
