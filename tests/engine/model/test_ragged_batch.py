"""Rows with and without padding, packed into the tensor that a forward takes."""

import pytest

from engine.model.forward_input import RowInput
from engine.model.ragged_batch import pack_inputs, wanted_tokens

ROWS = [RowInput(slot=3, start=2, tokens=[7, 8]), RowInput(slot=1, start=4, tokens=[9])]


def test_ragged_rows_lie_one_after_the_other() -> None:
    tokens, positions, batch = pack_inputs(ROWS).unpack()
    assert tokens.tolist() == [[7, 8, 9]]
    assert positions.tolist() == [[2, 3, 4]]
    assert [field.tolist() for field in batch[:3]] == [[3, 1], [0, 2, 3], [4, 5]]
    assert [field.tolist() for field in batch[3:6]] == [[2, 3, 4], [2, 3, 4], [0, 0, 1]]
    assert batch.trunks.tolist() == [3, 4, 5]
    assert batch.branches.tolist() == [0, 0, 0]
    assert batch.window_branches is batch.branches


def test_all_padding_is_in_the_last_row() -> None:
    tokens, positions, batch = pack_inputs(ROWS, window=2, row_count=4, token_count=6, spare_slot=5).unpack()
    assert tokens.tolist() == [[7, 8, 9, 0, 0, 0]]
    assert positions.tolist() == [[2, 3, 4, 0, 0, 0]]
    assert [field.tolist() for field in batch[:3]] == [[3, 1, 5, 5], [0, 2, 3, 3, 6], [4, 5, 1, 1]]
    assert [field.tolist() for field in batch[3:6]] == [[2, 3, 4, 0, 0, 0], [2, 3, 4, 0, 0, 0], [0, 0, 1, 3, 3, 3]]
    assert batch.trunks.tolist() == [3, 4, 5, 1, 1, 1]


def test_a_path_is_text_as_far_as_it_follows_the_text_and_bits_beyond() -> None:
    row = RowInput(0, 12, [1, 2, 3], trunk=10, paths=[[10, 11, 12], [10, 13], [10, 12, 14]])
    _, positions, batch = pack_inputs([row], window=1).unpack()
    assert positions.tolist() == [[12, 11, 12]]
    assert batch.trunks.tolist() == [13, 11, 11]
    assert batch.branches.tolist() == [0, 0b100, 0b1010]
    assert batch.window_branches.tolist() == [0, 0b100, 0b1000]


def test_a_tree_reaches_64_columns_beyond_its_text() -> None:
    _, _, batch = pack_inputs([RowInput(0, 73, [1], trunk=10, paths=[[11, 73]])]).unpack()
    assert batch.branches.tolist() == [2 - 2**63]
    with pytest.raises(ValueError, match="64 columns beyond its text; 63 are allowed"):
        pack_inputs([RowInput(0, 74, [1], trunk=10, paths=[[11, 74]])])


def test_the_tokens_after_which_logits_are_wanted() -> None:
    rows = [RowInput(0, 0, [1, 2, 3], wanted=1), RowInput(1, 5, [4, 5]), RowInput(2, 0, [6], wanted=0)]
    assert wanted_tokens(rows) == [2, 3, 4]
