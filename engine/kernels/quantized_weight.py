"""Weights that are integers of 4 or 8 bits, or numbers of 8, in groups with a scale."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from decoding.errors import ConfigError

PARTS = "weight", "scales", "offsets", "order", "table"  # names of its tensors in modules and files
GROUP = 32  # inputs that share a scale where weights are rounded here
Quantization = Literal["int4", "int8", "nf4"]  # what weights are rounded to
BITS: Mapping[Quantization, int] = {"int4": 4, "int8": 8, "nf4": 4}
NF4_BLOCK = 64  # inputs that share a scale in NF4
_NF4 = torch.tensor(  # Dettmers et al., arXiv 2305.14314, appendix E: each is as likely, if weights are normal
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
_NOT_FINITE = "weights that are no finite numbers, or above 500,000, can't be rounded"
_SHRUNK = torch.linspace(1.0, 0.72, 8)  # scales to try, relative to the one that fits the largest weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [out, in] of scale · (code − zero) + offset, with a scale and an offset for each group of inputs.

    Of E experts it is one for each: all tensors but the order then have a dimension [E, …] before these. `in` is a
    multiple of a group's inputs, and these of 8. Without offsets, `zero` is the middle code, else 0.
    """

    codes: Tensor  # [out, in · bits / 8] uint8; of 4 bits, the lower half comes first
    scales: Tensor  # [out, groups] float32 or float16
    offsets: Tensor | None  # [out, groups], like scales; None: zeros
    bits: int  # 4 or 8
    order: Tensor | None = None  # [in] int64: the input of each column; None: column i is for input i
    table: Tensor | None = None  # [16] float32: the numbers that codes of 4 bits stand for, without offsets
    floats: bool = False  # codes are numbers of type float8_e4m3fn, and there are no offsets
    rounds_inputs: bool = False  # products on a CPU round each group of inputs to 8 bits, with a scale per row

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] or [E, out, in]."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs in a group."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def zero(self) -> int:
        """The code that stands for 0, or for the offset."""
        return 1 << self.bits - 1 if self.has_integers and self.offsets is None else 0

    @property
    def has_integers(self) -> bool:
        """Whether codes are integers, and no other numbers."""
        return not self.floats and self.table is None

    @property
    def unpacked_codes(self) -> Tensor:
        """[out, in] or [E, out, in], uint8."""
        if self.bits == 8:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)

    def dequantized(self) -> Tensor:
        """Return the numbers in float32."""
        codes = self.codes.view(torch.float8_e4m3fn) if self.floats else self.unpacked_codes
        codes = codes if self.table is None else self.table[codes.int()]
        grouped: Tensor = (codes.to(torch.float32) - self.zero).unflatten(-1, (-1, self.group))
        weights: Tensor = grouped * self.scales.float()[..., None]
        if self.offsets is not None:
            weights += self.offsets.float()[..., None]
        columns = weights.flatten(-2)
        return columns if self.order is None else columns[..., self.order.argsort()]

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that it has, by `PARTS`."""
        tensors = self.codes, self.scales, self.offsets, self.order, self.table
        return {name: tensor for name, tensor in zip(PARTS, tensors, strict=True) if tensor is not None}

    def can_join(self, other: "QuantizedWeight") -> bool:
        """Whether `joined` can make one matrix of both."""
        own, others = (
            (weight.bits, weight.floats, weight.shape[-1], weight.group, weight.scales.dtype, weight.offsets is None)
            for weight in (self, other)
        )
        return own == others and _are_equal(self.order, other.order) and _are_equal(self.table, other.table)

    def regrouped(self, factor: int) -> "QuantizedWeight":
        """Return the same numbers in `factor` times as many groups, which it divides evenly."""
        finer = partial(torch.repeat_interleave, repeats=factor, dim=-1)
        return replace(self, scales=finer(self.scales), offsets=None if self.offsets is None else finer(self.offsets))

    def rows(self, rows: Tensor) -> "QuantizedWeight":
        """Return a matrix of some rows, or one for each expert. rows: [N] int64."""
        return self._changed(lambda tensor: tensor[..., rows, :])

    def expert(self, index: int) -> "QuantizedWeight":
        """Return the matrix [out, in] of one of E experts."""
        return self._changed(lambda tensor: tensor[index])

    @classmethod
    def joined(cls, weights: "Sequence[QuantizedWeight]") -> "QuantizedWeight":
        """Return one matrix of all rows, of weights that can be joined; of experts, one for each."""
        return cls._merged(weights, partial(torch.cat, dim=-2))

    @classmethod
    def stacked(cls, weights: "Sequence[QuantizedWeight]") -> "QuantizedWeight":
        """Return the matrices of experts, one for each of those that are given. They can be joined, too."""
        return cls._merged(weights, torch.stack)

    @classmethod
    def _merged(
        cls, weights: "Sequence[QuantizedWeight]", merge: Callable[[list[Tensor]], Tensor]
    ) -> "QuantizedWeight":
        offsets = [weight.offsets for weight in weights if weight.offsets is not None]
        return replace(
            weights[0],
            codes=merge([weight.codes for weight in weights]),
            scales=merge([weight.scales for weight in weights]),
            offsets=merge(offsets) if offsets else None,
        )

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        offsets = None if self.offsets is None else change(self.offsets)
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets)


def weight_of(parts: Sequence[Any], bits: int, *, floats: bool) -> QuantizedWeight:
    """Return the weight that has these tensors, in the order of `PARTS`."""
    codes, scales, offsets, order, table = parts
    return QuantizedWeight(
        codes=codes, scales=scales, offsets=offsets, bits=bits, order=order, table=table, floats=floats
    )


def _are_equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left is right or torch.equal(left, right)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes as `QuantizedWeight` has them. codes: [..., in] uint8."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def rounded(weight: Tensor, kind: Quantization) -> QuantizedWeight:
    """Quantise a matrix [out, in], or [E, out, in] of experts; `in` is a multiple of `GROUP`.

    Raises ConfigError if some numbers are not finite, or too large for a scale.
    """
    return _rounded_to_nf4(weight) if kind == "nf4" else rounded_to_nearest(weight, BITS[kind])


def _rounded_to_nf4(weight: Tensor) -> QuantizedWeight:
    """The largest of each block becomes 1 or -1. bitsandbytes rounds to the same codes, to the bit."""
    blocks = weight.detach().float().contiguous().unflatten(-1, (-1, gcd(weight.shape[-1], NF4_BLOCK)))
    scales, table = blocks.abs().amax(dim=-1), _NF4.to(weight.device, copy=True)
    if not bool(scales.isfinite().all()):
        raise ConfigError(_NOT_FINITE)
    shrunk = blocks * (1.0 / scales.clamp(min=1e-38))[..., None]
    codes = torch.bucketize(shrunk, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8).flatten(-2)
    return QuantizedWeight(codes=pack_codes(codes, 4), scales=scales, offsets=None, bits=4, table=table)


def rounded_to_nearest(weight: Tensor, bits: int, group: int = GROUP) -> QuantizedWeight:
    """Quantise a matrix without offsets. Of a few scales, each group gets the one with the least squared error.

    weight: [out, in], or [E, out, in] of experts; `in` is a multiple of `group`.

    Raises ConfigError if some are not finite, or too large for a scale in float16.
    """
    if weight.dim() == 3:
        return QuantizedWeight.stacked([rounded_to_nearest(matrix, bits, group) for matrix in weight])
    groups = weight.detach().float().unflatten(1, (-1, group))  # [out, groups, group]
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    lowest, highest = -(1 << bits - 1), (1 << bits - 1) - 1
    best = torch.full_like(largest, torch.inf)
    scales, codes = torch.zeros_like(largest), torch.zeros_like(groups)
    for part in _SHRUNK.tolist() if bits == 4 else [1.0]:  # more codes are below zero than above
        scale = (largest * part / lowest).half().float()
        these = (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(lowest, highest)
        error = (these * scale - groups).square().sum(dim=-1, keepdim=True)
        better = error < best
        best, scales, codes = (torch.where(better, *pair) for pair in ((error, best), (scale, scales), (these, codes)))
    if bool(best.isinf().any()):
        raise ConfigError(_NOT_FINITE)
    unsigned = (codes - lowest).to(torch.uint8).flatten(1)
    return QuantizedWeight(codes=pack_codes(unsigned, bits), scales=scales[..., 0].half(), offsets=None, bits=bits)
