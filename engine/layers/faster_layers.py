"""Faster layers for a loaded model, on the device where it is, without changes to its code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.latent import replace_latent_projections
from engine.layers.linear import FixedOrderLinear, NativeLinear, has_fixed_order, has_kernel
from engine.layers.lora import LoraLayers
from engine.layers.mlp import replace_activations, replace_mlps
from engine.layers.norm import replace_norms
from engine.layers.packing import pack_linears
from engine.layers.quantized_experts import QuantizedExperts, pack_experts
from engine.layers.quantized_linear import (
    NativeQuantizedEmbedding,
    NativeQuantizedLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    quantized_kernel,
)
from engine.layers.rotary import replace_rotary


class CudaOutputLayer(nn.Module):
    """The same on a GPU, by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [V, H]; bias: [V]."""
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns [..., V] float32."""
        logits = torch.mm(x.flatten(0, -2), self.weight.T, out_dtype=torch.float32)
        return (logits if self.bias is None else logits.add_(self.bias)).view(*x.shape[:-1], -1)


def replace_output_layer(model: PreTrainedModel, *, deterministic: bool = True) -> None:
    """Let the output layer give float32, if it is a plain 16-bit layer. On a CPU that takes bfloat16 and a compiler."""
    head = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        _replace_quantized_output(model, head)
    if type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
        return
    weight = head.weight
    kind: Callable[[Tensor, Tensor | None], nn.Module] | None = None
    if deterministic and has_fixed_order(weight):
        kind = partial(FixedOrderLinear, out_dtype=torch.float32)
    elif weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16):
        kind = CudaOutputLayer
    elif weight.dtype == torch.bfloat16 and has_kernel(weight):
        kind = partial(NativeLinear, out_dtype=torch.float32)
    if kind is not None:
        model.set_submodule(_path(model, head), kind(weight, head.bias))


def _replace_quantized_output(model: PreTrainedModel, head: QuantizedLinear) -> None:
    """Let the output layer give float32, and the embedding read the same integers if they are tied."""
    kind = quantized_kernel(head.quantized)
    if kind is None:
        return
    packed = kind(head.quantized, head.bias, out_dtype=torch.float32)
    embedding: Any = model.get_input_embeddings()
    tied = isinstance(embedding, QuantizedEmbedding) and embedding.codes is head.codes
    if tied and isinstance(packed, NativeQuantizedLinear):
        fresh = NativeQuantizedEmbedding(packed, embedding.dtype, embedding.factor)
        model.set_submodule(_path(model, embedding), fresh)
    model.set_submodule(_path(model, head), packed)


def _path(model: nn.Module, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {other: path for path, other in model.named_modules()}
    return names[module]


def round_inputs(module: nn.Module) -> bool:
    """Let layers in `module` that hold integers round their inputs to 8 bits on a CPU; return whether there are any.

    They are not replaced yet.
    """
    rounding: list[Any] = [layer for layer in module.modules() if any(map(_computes_integers, _weights(layer)))]
    for layer in rounding:
        layer.rounds_inputs = True
    return bool(rounding)


def _weights(layer: nn.Module) -> list[QuantizedWeight]:
    if isinstance(layer, QuantizedExperts):
        return [layer.quantized(name) for name in layer.matrices]
    return [layer.quantized] if isinstance(layer, QuantizedLinear) else []


def _computes_integers(weight: QuantizedWeight) -> bool:
    return weight.has_integers and quantized_kernel(weight) is not None


def use_faster_layers(model: PreTrainedModel, *, deterministic: bool = True, lora: LoraLayers | None = None) -> None:
    """Replace layers below `model` by faster ones that compute the same up to rounding.

    deterministic: layers give a token the same bits whatever else they compute.
    lora: adapters that its linear layers get.
    """
    replace_output_layer(model, deterministic=deterministic)
    use_faster_parts(model, deterministic=deterministic, lora=lora)


def use_faster_parts(module: nn.Module, *, deterministic: bool = False, lora: LoraLayers | None = None) -> None:
    """Replace layers below a module that is no whole model, such as heads that draft. Otherwise as above."""
    replace_latent_projections(module, deterministic=deterministic)
    if lora is None:
        pack_linears(module, deterministic=deterministic)
    else:
        pack_linears(module, deterministic=deterministic, wrap=lora.wrap)
    replace_norms(module, deterministic=deterministic)
    replace_mlps(module)  # after their projections
    pack_experts(module)
    replace_activations(module)  # of other layers
    replace_rotary(module)
