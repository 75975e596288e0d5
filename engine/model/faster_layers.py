"""Faster layers for a loaded model, on the device where it is, without changes to its code."""

from torch import nn
from transformers import PreTrainedModel

from engine.model.lora.layers import LoraLayers
from engine.model.native.activation import replace_activations
from engine.model.native.gated_mlp import replace_mlps
from engine.model.native.norm import replace_norms
from engine.model.native.output_layer import replace_output_layer
from engine.model.native.rotary import replace_rotary
from engine.model.packed_linear import pack_linears


def use_faster_layers(model: PreTrainedModel, *, deterministic: bool = True, lora: LoraLayers | None = None) -> None:
    """Replace layers below `model` by faster ones that compute the same up to rounding.

    Args:
        deterministic: layers give a token the same bits whatever else they compute.
        lora: adapters that its linear layers get.
    """
    replace_output_layer(model, deterministic=deterministic)
    use_faster_parts(model, deterministic=deterministic, lora=lora)


def use_faster_parts(module: nn.Module, *, deterministic: bool = False, lora: LoraLayers | None = None) -> None:
    """Replace layers below a module that is no whole model, such as heads that draft. Otherwise as above."""
    if lora is None:
        pack_linears(module, deterministic=deterministic)
    else:
        pack_linears(module, deterministic=deterministic, wrap=lora.wrap)
    replace_norms(module, deterministic=deterministic)
    replace_mlps(module)  # after their projections
    replace_activations(module)  # of other layers
    replace_rotary(module)
