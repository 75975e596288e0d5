"""What makes a model's layers fast, on the device where they are, without touching the model's code."""

from torch import nn

from actors.model.native.gated_mlp import replace_mlps
from actors.model.native.norm import replace_norms
from actors.model.native.rotary import replace_rotary
from actors.model.packed_linear import pack_linears


def use_faster_layers(model: nn.Module) -> None:
    """Replace the layers below `model` for which there are faster ones that compute the same, up to rounding."""
    pack_linears(model)
    replace_norms(model)
    replace_mlps(model)  # after their projections
    replace_rotary(model)
