"""Weights laid out for oneDNN once, at loading, instead of at every call: about twice as fast on CPUs.

torch's own `linear` leaves weights as they are, and reads them at little more than half the memory bandwidth when there
are few tokens: see docs/experiments.md.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

_TOKENS = 8  # what the layout is made for; it serves other numbers almost as well
_DTYPES = (torch.float32, torch.bfloat16)


# Layers that models apply to the same input, in this order: as one they keep the threads busy for longer.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


class FirstOfSeveral(nn.Module):
    """The first of some linear layers that see the same input: computes all of them at once."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [bias for linear in linears if (bias := getattr(linear, "bias", None)) is not None]
        self._all = PackedLinear(weight, torch.cat(biases) if biases else None)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features] of the first."""
        self._input = x
        first, *self._results = self._all(x).split(self._sizes, dim=-1)
        result: Tensor = first
        return result

    def take(self, x: Tensor) -> Tensor:
        """The result of the next layer, for the input that the first one had."""
        assert x is self._input, "the layers of a group have different inputs"
        return self._results.pop(0)


class NextOfSeveral(nn.Module):
    """A linear layer that was computed by the first one of its group."""

    def __init__(self, first: FirstOfSeveral) -> None:
        super().__init__()
        self._take = first.take

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], the very tensor that the first one was given; returns [..., out_features]."""
        return self._take(x)


@torch.no_grad()
def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers below `module` that profit, in turn, so that memory never holds two copies."""
    if not torch.backends.mkldnn.is_available():
        return
    for names in _TOGETHER:
        _join(module, names)
    for name, child in module.named_children():
        if _profits(child):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)


def _join(module: nn.Module, names: Sequence[str]) -> None:
    """Make one of the layers of these names, if the module has all of them and they are alike."""
    linears = [child for name in names if _profits(child := getattr(module, name, None))]
    if len(linears) < len(names) or len({getattr(linear, "bias", None) is None for linear in linears}) > 1:
        return
    first = FirstOfSeveral(linears)
    setattr(module, names[0], first)
    for name in names[1:]:
        setattr(module, name, NextOfSeveral(first))


def _profits(module: object) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
