"""CUDA graphs of decoding and verification: a step is one launch, whatever the number of kernels in it.

A graph needs fixed shapes and addresses. So rows, tokens per row and columns are rounded up to buckets, and inputs are
copied into permanent buffers. Padding is written to a slot that no request has.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.forward_input import RowInput
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.slot_batch import PackedInputs, SlotBatch, pack_inputs, padding_row
from decoding.sampling.transfer import tensor_on

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
MAX_ROWS = _ROWS[-1]
_WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_COLUMNS = 256  # columns are rounded up to a multiple of this

Forward = Callable[[Tensor, Tensor, SlotBatch], Tensor]  # tokens, positions: [1, N]; returns [N, V]


class Shape(NamedTuple):
    """A bucket: B rows of Q tokens, and the first L columns."""

    rows: int
    width: int
    columns: int


class CudaGraphs:
    """One graph per bucket, captured on the bucket's first use."""

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        dtype: torch.dtype,
        spare_slot: int,
        capacity: int,
        window: int | None = None,
        recorder: GraphRecorder,
    ) -> None:
        """
        spare_slot: the slot that padding is written to.
        capacity: columns of a slot.
        window: the sliding window of the layers that have one, in tokens.
        """
        self._forward, self._device, self._dtype = forward, device, dtype
        self._spare_slot, self._capacity, self._window = spare_slot, capacity, window
        self._recorder = recorder
        self._captured: dict[Shape, tuple[PackedInputs, Replay]] = {}

    def bucket(self, rows: Sequence[RowInput]) -> Shape | None:
        """Return the smallest bucket with room for the rows; None for rows that are too many or too long."""
        width = max(len(row.tokens) for row in rows)
        if len(rows) > MAX_ROWS or width > _WIDTHS[-1]:
            return None
        columns = columns_bucket(max(row.end for row in rows), self._capacity)
        return Shape(rows_bucket(len(rows)), _round_up(width, _WIDTHS), columns)

    def logits(self, shape: Shape, rows: Sequence[RowInput]) -> Tensor:
        """Return [N, V] logits after every token, row after row. The rows must fit into `shape`."""
        inputs = self._pack(shape, rows)
        if shape not in self._captured:
            buffers = inputs.copy_to(self._device)
            views = buffers.unpack()
            self._captured[shape] = buffers, self._recorder.record(lambda: self._forward(*views))
        buffers, replay = self._captured[shape]
        buffers.overwrite(inputs)
        real = [i * shape.width + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return replay()[tensor_on(self._device, real, torch.int64)]

    def _pack(self, shape: Shape, rows: Sequence[RowInput]) -> PackedInputs:
        """Pack the rows and the padding that the bucket needs."""
        return pack_inputs(
            [*rows, *[padding_row(self._spare_slot, shape.width)] * (shape.rows - len(rows))],
            shape.columns,
            dtype=self._dtype,
            window=self._window,
            width=shape.width,
            spare_slot=self._spare_slot,
        )


def rows_bucket(count: int) -> int:
    """Round a number of rows, at most `MAX_ROWS`, up to a bucket's."""
    return _round_up(count, _ROWS)


def columns_bucket(count: int, capacity: int) -> int:
    """Round a number of columns up to a bucket's."""
    return min(math.ceil(count / _COLUMNS) * _COLUMNS, capacity)


def _round_up(value: int, buckets: Sequence[int]) -> int:
    return buckets[bisect_left(buckets, value)]
