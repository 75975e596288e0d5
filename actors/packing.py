"""Weights laid out for oneDNN once, at loading, instead of at every call: about twice as fast on CPUs.

torch's own `linear` leaves weights as they are, and reads them at little more than half the memory bandwidth when there
are few tokens: see docs/experiments.md.
"""

import torch
from torch import Tensor, nn

_TOKENS = 8  # what the layout is made for; it serves other numbers almost as well
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TOKENS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


@torch.no_grad()
def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers below `module` that profit, in turn, so that memory never holds two copies."""
    if not torch.backends.mkldnn.is_available():
        return
    for name, child in module.named_children():
        if type(child) is nn.Linear and _profits(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def _profits(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
