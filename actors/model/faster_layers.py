"""Faster layers for a loaded model, on the device where it is, without changes to its code."""

from torch import nn

from actors.model.native.gated_mlp import replace_mlps
from actors.model.native.norm import replace_norms
from actors.model.native.rotary import replace_rotary
from actors.model.packed_linear import pack_linears


def use_faster_layers(model: nn.Module) -> None:
    """Replace layers below `model` by faster ones that compute the same up to rounding."""
    pack_linears(model)
    replace_norms(model)
    replace_mlps(model)  # after their projections
    replace_rotary(model)
