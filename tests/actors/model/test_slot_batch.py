"""Rows with and without padding, packed into the tensors that a forward takes."""

import math

import torch

from actors.model.forward_input import RowInput
from actors.model.slot_batch import pack_inputs, padding_row

ROWS = [RowInput(slot=3, start=2, tokens=[7, 8]), RowInput(slot=1, start=4, tokens=[9])]


def test_ragged_rows_lie_one_after_the_other() -> None:
    tokens, positions, batch = pack_inputs(ROWS, 5, dtype=torch.float32).unpack()
    assert tokens.tolist() == [[7, 8, 9]]
    assert positions.tolist() == [[2, 3, 4]]
    lists = [field.tolist() for field in batch[:6]]
    assert lists == [[3, 3, 1], [2, 3, 4], [3, 1], [0, 2, 3], [4, 5], [0, 1, 2]]
    hidden = batch.mask == -math.inf
    assert hidden.int().tolist() == [[[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]], [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]]
    assert batch.windowed is batch.mask


def test_padding_is_written_to_the_spare_slot_and_sees_something() -> None:
    rows = [*ROWS, padding_row(5, 2)]
    inputs = pack_inputs(rows, 5, dtype=torch.float32, window=2, width=2, spare_slot=5)
    tokens, positions, batch = inputs.unpack()
    assert tokens.tolist() == [[7, 8, 9, 0, 0, 0]]
    assert positions.tolist() == [[2, 3, 4, 0, 0, 1]]
    assert [field.tolist() for field in batch[:4]] == [[3, 3, 1, 5, 5, 5], [2, 3, 4, 1, 0, 1], [3, 1, 5], [0, 2, 4, 6]]
    assert batch.flat.tolist() == list(range(6))
    for mask in (batch.mask, batch.windowed):
        assert not (mask == -math.inf).all(dim=-1).any()


def test_overwritten_buffers_keep_their_memory() -> None:
    buffers = pack_inputs([padding_row(5, 2)] * 2, 5, dtype=torch.float32, width=2, spare_slot=5)
    tokens, _, batch = buffers.unpack()
    buffers.overwrite(pack_inputs(ROWS, 5, dtype=torch.float32, width=2, spare_slot=5))
    assert tokens.tolist() == [[7, 8, 9, 0]]
    assert batch.rows.tolist() == [3, 1]
