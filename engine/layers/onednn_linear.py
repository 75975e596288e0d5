"""Linear layers that oneDNN computes, on CPUs without a compiler for our kernels.

For each number of tokens, oneDNN and torch cache 0.8 MiB of code per shape of weights. So few numbers of tokens are
computed: `padded_size`. Without AMX, oneDNN gives a token the same bits for every number of tokens but one, so there
are at least two. With AMX the bits depend on the batch. Each shape is checked where it runs.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.kernels.operator_trace import as_one_operator

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_TOKENS = 8  # the layout is made for so many; it serves other numbers almost as well
_LEAST, _EXACT = 2, 16  # tokens; between these there is no padding
_SIZES_PER_DOUBLING = 8  # beyond that: padding adds at most an eighth
_CHECKED = (2, 3, 4, 8, 16, 18, 32, 64, 128, 256)  # numbers of tokens whose results are compared
_MOVED = slice(50, 66)  # tokens whose results are compared with those that they get at the beginning
_product = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")
_sizes_by_shape: dict[tuple[object, ...], Sequence[int]] = {}  # of `_sizes`: the machine's property, measured once

_log = logging.getLogger(__name__)


def onednn_computes(weight: Tensor) -> bool:
    """Whether oneDNN computes the layer on this CPU, and in its dtype."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """A linear layer that oneDNN computes; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, deterministic: bool = True) -> None:
        """weight: [out_features, in_features]; bias: [out_features]. deterministic: see `use_faster_layers`."""
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
        self.bias = bias
        self._sizes = _sizes(self.weight) if deterministic else ()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return packed_linear(x, self.weight, self.bias, self._sizes)


def padded_size(tokens: int) -> int:
    """Round a number of tokens up to one that `PackedLinear` computes."""
    if tokens <= _EXACT:
        return max(tokens, _LEAST)
    step = (1 << (tokens - 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return -(-tokens // step) * step


@as_one_operator
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int] = ()) -> Tensor:
    """x: [..., in_features]; weight: packed; sizes: see `PackedLinear`; returns [..., out_features]."""
    tokens = x.shape[:-1].numel()
    if sizes and tokens > sizes[-1]:
        parts = x.reshape(tokens, -1).split(sizes[-1])
        return torch.cat([packed_linear(part, weight, bias, sizes) for part in parts]).view(*x.shape[:-1], -1)
    # The forward is padded as a whole, but the output layer sees some tokens only, and experts see any number.
    padding = (sizes[bisect_left(sizes, tokens)] if sizes else padded_size(tokens)) - tokens
    result: Tensor
    if padding:
        padded = pad(x.reshape(tokens, -1), (0, 0, 0, padding))
        result = _product(padded, weight, bias)[:tokens].view(*x.shape[:-1], -1)
    else:
        result = _product(x, weight, bias)
    return result


def _sizes(weight: Tensor) -> Sequence[int]:
    """Return the numbers of tokens that give a token the same bits; () if all do. weight: packed."""
    key = *weight.shape, weight.dtype, torch.get_num_threads()
    if key not in _sizes_by_shape:
        x = torch.randn(_CHECKED[-1], weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        results = [_product(x[:count], weight, None) for count in _CHECKED]
        sizes = _largest_group(results)
        if not torch.equal(_product(x[_MOVED], weight, None), results[-1][_MOVED]):
            _log.warning("products of %s depend on the batch; install a C++ compiler, then they don't", [*weight.shape])
        elif len(sizes) < len(_CHECKED):
            _log.warning("products of %s run with %s tokens only, where rounding is the same", [*weight.shape], sizes)
        _sizes_by_shape[key] = () if len(sizes) == len(_CHECKED) else sizes
    return _sizes_by_shape[key]


def _largest_group(results: Sequence[Tensor]) -> Sequence[int]:
    """Return the numbers of rows of those results that agree with each other. They are of the same rows' beginnings."""
    groups = [
        [len(right) for right in results if torch.equal(left[: len(right)], right[: len(left)])] for left in results
    ]
    return max(groups, key=len)
