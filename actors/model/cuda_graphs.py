"""CUDA graphs of decoding and verification: a step is one launch, whatever the number of kernels in it.

A graph needs fixed shapes and addresses. So rows and tokens per row are rounded up to buckets, and inputs are
copied into permanent buffers. Padding is written to a slot that no request has.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.forward_input import RowInput
from actors.model.graph_recorder import GraphRecorder, Replay
from actors.model.ragged_batch import PackedInputs, RaggedBatch, pack_inputs

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
MAX_ROWS = _ROWS[-1]
_WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)

Forward = Callable[[Tensor, Tensor, RaggedBatch], Tensor]  # tokens, positions: [1, N]; returns [N, V]


class Shape(NamedTuple):
    """A bucket: B rows of Q tokens on average. One more row is padding."""

    rows: int
    width: int


class CudaGraphs:
    """One graph per bucket, captured on the bucket's first use."""

    def __init__(
        self,
        forward: Forward,
        *,
        device: torch.device,
        spare_slot: int,
        window: int | None = None,
        recorder: GraphRecorder,
    ) -> None:
        """
        spare_slot: the slot that padding is written to.
        window: the sliding window of the layers that have one, in tokens.
        """
        self._forward, self._device = forward, device
        self._spare_slot, self._window = spare_slot, window
        self._recorder = recorder
        self._captured: dict[Shape, tuple[PackedInputs, Replay]] = {}

    def bucket(self, rows: Sequence[RowInput]) -> Shape | None:
        """Return the smallest bucket with room for the rows; None for rows that are too many or too long."""
        width = max(len(row.tokens) for row in rows)
        if len(rows) > MAX_ROWS or width > _WIDTHS[-1]:
            return None
        return Shape(rows_bucket(len(rows)), _round_up(width, _WIDTHS))

    def logits(self, shape: Shape, rows: Sequence[RowInput]) -> Tensor:
        """Return [N, V] logits after every token, row after row. The rows must fit into `shape`."""
        inputs = self._pack(shape, rows)
        if shape not in self._captured:
            buffers = inputs.copy_to(self._device)
            views = buffers.unpack()
            self._captured[shape] = buffers, self._recorder.record(lambda: self._forward(*views))
        buffers, replay = self._captured[shape]
        buffers.overwrite(inputs)
        return replay()[: sum(len(row.tokens) for row in rows)]

    def _pack(self, shape: Shape, rows: Sequence[RowInput]) -> PackedInputs:
        """Pack the rows and the padding that the bucket needs."""
        return pack_inputs(
            rows,
            window=self._window,
            row_count=shape.rows + 1,
            token_count=shape.rows * shape.width,
            spare_slot=self._spare_slot,
        )


def rows_bucket(count: int) -> int:
    """Round a number of rows, at most `MAX_ROWS`, up to a bucket's."""
    return _round_up(count, _ROWS)


def _round_up(value: int, buckets: Sequence[int]) -> int:
    return buckets[bisect_left(buckets, value)]
