"""Weights laid out for oneDNN once, at loading, instead of at every call: about twice as fast on CPUs.

torch's own `linear` leaves weights as they are, and reads them at little more than half the memory bandwidth when there
are few tokens: see docs/experiments.md. Layers that see the same input are computed as one, on CPUs and GPUs.

For each number of tokens, oneDNN and torch keep 0.8 MiB of code and descriptions per shape of weights. So packed layers
see few numbers: `padded_size`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from actors.model.operator_trace import as_one_operator

_TOKENS = 8  # what the layout is made for; it serves other numbers almost as well
_DTYPES = (torch.float32, torch.bfloat16)
_EXACT = 16  # tokens, up to which there is no padding
_SIZES_PER_DOUBLING = 8  # beyond that: at most an eighth is added


# Layers that models apply to the same input: as one they keep the threads busy for longer.
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
        return packed_linear(x, self.weight, self.bias)


def padded_size(tokens: int) -> int:
    """The number of tokens, at least as many, that a packed layer computes."""
    if tokens <= _EXACT:
        return tokens
    step = (1 << (tokens - 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return -(-tokens // step) * step


@as_one_operator
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in_features]; weight: packed; returns [..., out_features]."""
    tokens = x.shape[:-1].numel()
    more = padded_size(tokens) - tokens
    result: Tensor
    if more:
        padded = pad(x.reshape(tokens, -1), (0, 0, 0, more))
        result = _product(padded, weight, bias)[:tokens].view(*x.shape[:-1], -1)
    else:
        result = _product(x, weight, bias)
    return result


_product = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")


class JoinedLinear(nn.Module):
    """Some linear layers' weights, one below the other, as torch computes them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return linear(x, self.weight, self.bias)


class PackedTogether:
    """Some linear layers that see the same input, computed at once when the first of them is called."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [bias for linear in linears if (bias := getattr(linear, "bias", None)) is not None]
        kind = PackedLinear if weight.device.type == "cpu" else JoinedLinear
        self.joined = kind(weight, torch.cat(biases) if biases else None)
        self.in_features = linears[0].in_features
        self.like = weight.new_empty(0)  # their dtype and device
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._results: Sequence[Tensor] = ()
        self._asked = 0  # how many of them

    def result(self, index: int, x: Tensor) -> Tensor:
        """[..., out_features] of one of the layers; x: [..., in_features], the same tensor for all of them."""
        if x is not self._input:
            self._input, self._asked = x, 0
            self._results = self.joined(x).split(self._sizes, dim=-1)
        result = self._results[index]
        self._asked += 1
        if self._asked == len(self._sizes):  # or they would stay in memory until the next call
            self._input, self._results = None, ()
        return result


class OneOfSeveral(nn.Module):
    """A linear layer that is computed together with others."""

    def __init__(self, together: PackedTogether, index: int) -> None:
        super().__init__()
        self.together, self._index = together, index

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return self.together.result(self._index, x)


@torch.no_grad()
def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers below `module` that profit, in turn, so that memory never holds two copies."""
    for names in _TOGETHER:
        _join(module, names)
    for name, child in module.named_children():
        if _profits(child) and child.weight.device.type == "cpu":
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)


def _join(module: nn.Module, names: Sequence[str]) -> None:
    """Make one of the layers of these names, if the module has all of them and they are alike."""
    linears = [child for name in names if _profits(child := getattr(module, name, None))]
    kinds = {(layer.weight.device, layer.weight.dtype, layer.bias is None) for layer in linears}
    if len(linears) < len(names) or len(kinds) > 1:
        return
    together = PackedTogether(linears)
    for index, name in enumerate(names):
        setattr(module, name, OneOfSeveral(together, index))


def _profits(module: object) -> TypeGuard[nn.Linear]:
    """Whether it is a plain layer, of a model that is on one device, and of a type that its device is good at."""
    if type(module) is not nn.Linear or hasattr(module, "_hf_hook"):
        return False
    if module.weight.device.type == "cuda":
        return module.weight.is_floating_point()
    if module.weight.device.type != "cpu" or module.weight.dtype not in _DTYPES:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return module.weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
