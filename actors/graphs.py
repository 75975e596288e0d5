"""CUDA graphs of decoding and verification: a step is one launch, whatever the number of kernels in it.

A graph needs fixed shapes and addresses. So rows, tokens per row and columns are rounded up to buckets, and the inputs
are copied into buffers that stay. Padding is written to a slot that no request has.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE

from actors.attention import SlotBatch
from actors.row_input import RowInput, visible_columns

_log = logging.getLogger(__name__)
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_COLUMNS = 256  # the cache's columns are rounded up to a multiple of that

Forward = Callable[[Tensor, Tensor, SlotBatch], Tensor]  # tokens, positions: [1, N]; returns [N, V]
Replay = Callable[[], Tensor]


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


class Graphs:
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
        capture: "Callable[[Replay], Replay] | None" = None,
    ) -> None:
        """
        spare_slot: where padding is written.
        capacity: columns of a slot.
        window: of the layers with a sliding window.
        capture: makes a replay of a call that has fixed buffers; CUDA's by default.
        """
        self._forward, self._device, self._dtype = forward, device, dtype
        self._spare_slot, self._capacity, self._window = spare_slot, capacity, window
        self._capture = capture or partial(_capture, pool=torch.cuda.graph_pool_handle())
        self._captured: dict[Shape, tuple[Buffers, Replay]] = {}

    def bucket(self, rows: Sequence[RowInput]) -> Shape | None:
        """The least bucket that has room for the rows; None if there is none, as for long prompts."""
        width = max(len(row.tokens) for row in rows)
        if len(rows) > _ROWS[-1] or width > _WIDTHS[-1]:
            return None
        columns = math.ceil(max(row.end for row in rows) / _COLUMNS) * _COLUMNS
        return Shape(_round_up(len(rows), _ROWS), _round_up(width, _WIDTHS), min(columns, self._capacity))

    def logits(self, shape: Shape, rows: Sequence[RowInput]) -> Tensor:
        """[N, V] after every token, row after row. The rows fit into `shape`."""
        if shape not in self._captured:
            buffers = self._allocate(shape)
            self._fill(buffers, shape, rows)
            self._captured[shape] = buffers, self._record(lambda: self._forward(*buffers))
        buffers, replay = self._captured[shape]
        self._fill(buffers, shape, rows)
        real = [i * shape.width + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return replay()[torch.tensor(real, device=self._device)]

    def _record(self, run: Replay) -> Replay:
        """A replay of the call; the call itself where the model does something that can't be recorded."""
        try:
            return self._capture(run)
        except RuntimeError as error:
            _log.warning("no CUDA graph, which costs speed: %s", error)
            return run

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
            buffer.copy_(values.view_as(buffer), non_blocking=True)
        for mask, window in ((batch.mask, None), (batch.windowed, self._window)):
            values = torch.zeros(shape)  # rows of padding see all, which is something: a softmax over nothing is NaN
            visible = visible_columns(rows, shape.width, shape.columns, window)
            values[: len(rows)].masked_fill_(~visible, -math.inf)
            mask.copy_(values, non_blocking=True)


def _round_up(value: int, buckets: Sequence[int]) -> int:
    return buckets[bisect_left(buckets, value)]


def _capture(run: Replay, pool: _POOL_HANDLE) -> Replay:
    """Record the kernels of a call; two calls before let libraries allocate what they need."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=pool
    ):  # results are copied before the next replay, so all graphs may share memory
        output = run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
