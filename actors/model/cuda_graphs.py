"""CUDA graphs of decoding and verification: a step is one launch, whatever the number of kernels in it.

A graph needs fixed shapes and addresses. So rows, tokens per row and columns are rounded up to buckets, and the inputs
are copied into buffers that stay. Padding is written to a slot that no request has.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.forward_input import RowInput, visible_columns
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.slot_batch import SlotBatch
from decoding.sampling.transfer import copy_into, tensor_on

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
MAX_ROWS = _ROWS[-1]
_WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_COLUMNS = 256  # the cache's columns are rounded up to a multiple of that

Forward = Callable[[Tensor, Tensor, SlotBatch], Tensor]  # tokens, positions: [1, N]; returns [N, V]


class Shape(NamedTuple):
    """A bucket: B rows of Q tokens, and the first L columns."""

    rows: int
    width: int
    columns: int


class Buffers(NamedTuple):
    """The inputs of one bucket, always in the same place. N = B * Q."""

    tokens: Tensor  # [1, N] int64
    positions: Tensor  # [1, N] int64
    batch: SlotBatch


class CudaGraphs:
    """One graph per bucket, captured when the bucket is first met."""

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
        spare_slot: where padding is written.
        capacity: columns of a slot.
        window: of the layers with a sliding window.
        """
        self._forward, self._device, self._dtype = forward, device, dtype
        self._spare_slot, self._capacity, self._window = spare_slot, capacity, window
        self._recorder = recorder
        self._captured: dict[Shape, tuple[Buffers, Replay]] = {}

    def bucket(self, rows: Sequence[RowInput]) -> Shape | None:
        """The least bucket that has room for the rows; None if there is none, as for long prompts."""
        width = max(len(row.tokens) for row in rows)
        if len(rows) > MAX_ROWS or width > _WIDTHS[-1]:
            return None
        columns = columns_bucket(max(row.end for row in rows), self._capacity)
        return Shape(rows_bucket(len(rows)), _round_up(width, _WIDTHS), columns)

    def logits(self, shape: Shape, rows: Sequence[RowInput]) -> Tensor:
        """[N, V] after every token, row after row. The rows fit into `shape`."""
        if shape not in self._captured:
            buffers = self._allocate(shape)
            self._fill(buffers, shape, rows)
            self._captured[shape] = buffers, self._recorder.record(lambda: self._forward(*buffers))
        buffers, replay = self._captured[shape]
        self._fill(buffers, shape, rows)
        real = [i * shape.width + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return replay()[tensor_on(self._device, real, torch.int64)]

    def _allocate(self, shape: Shape) -> Buffers:
        count = shape.rows * shape.width

        def index(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=self._device)

        mask = torch.zeros(shape, dtype=self._dtype, device=self._device)
        windowed = mask if self._window is None else torch.zeros_like(mask)
        batch = SlotBatch(
            slots=index(count),
            columns=index(count),
            rows=index(shape.rows),
            offsets=torch.arange(0, count + 1, shape.width, device=self._device),
            ends=torch.full((shape.rows,), shape.columns, device=self._device),
            flat=torch.arange(count, device=self._device),
            mask=mask,
            windowed=windowed,
        )
        return Buffers(index(1, count), index(1, count), batch)

    def _fill(self, buffers: Buffers, shape: Shape, rows: Sequence[RowInput]) -> None:
        """Copy the rows and their padding into the buffers."""
        tokens = torch.zeros(shape.rows, shape.width, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        slots = torch.full_like(tokens, self._spare_slot)
        columns = torch.arange(shape.width).repeat(shape.rows, 1)
        for i, row in enumerate(rows):
            count = len(row.tokens)
            tokens[i, :count] = torch.tensor(row.tokens)
            positions[i, :count] = torch.tensor(row.positions())
            slots[i, :count] = row.slot
            columns[i, :count] += row.start
        of_rows = torch.tensor([*(row.slot for row in rows), *[self._spare_slot] * (shape.rows - len(rows))])
        batch = buffers.batch
        for buffer, values in (
            (buffers.tokens, tokens),
            (buffers.positions, positions),
            (batch.slots, slots),
            (batch.columns, columns),
            (batch.rows, of_rows),
        ):
            copy_into(buffer, values)
        masks = [(batch.mask, None), (batch.windowed, self._window)]
        for mask, window in masks[: 1 if self._window is None else 2]:
            values = torch.zeros(shape, dtype=mask.dtype)
            visible = visible_columns(rows, shape.width, shape.columns, window)
            values[: len(rows)].masked_fill_(~visible, -math.inf)  # padding sees all: a softmax over nothing is NaN
            copy_into(mask, values)


def rows_bucket(count: int) -> int:
    """How many rows a graph for so many has, which are at most `MAX_ROWS`."""
    return _round_up(count, _ROWS)


def columns_bucket(count: int, capacity: int) -> int:
    """How many columns a graph for so many reads."""
    return min(math.ceil(count / _COLUMNS) * _COLUMNS, capacity)


def _round_up(value: int, buckets: Sequence[int]) -> int:
    return buckets[bisect_left(buckets, value)]
