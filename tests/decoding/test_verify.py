"""Verification against a plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.verify import accepted_lengths
from tests.support.properties import repeatable


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The target's tokens [B][K + 1], drafts [B][K] and their lengths; few tokens, so that many agree."""
    rows, k = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = st.integers(0, 2)
    sampled = draw(st.lists(st.lists(tokens, min_size=k + 1, max_size=k + 1), min_size=rows, max_size=rows))
    drafts = draw(st.lists(st.lists(tokens, min_size=k, max_size=k), min_size=rows, max_size=rows))
    return sampled, drafts, draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))


def accepted_by_loop(sampled: list[int], draft: list[int]) -> int:
    accepted = 0
    for chosen, drafted in zip(sampled, draft, strict=False):
        if chosen != drafted:
            break
        accepted += 1
    return accepted


@repeatable
@given(batches())
def test_accepted_lengths(batch: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    sampled, drafts, lengths = batch
    expected = [
        accepted_by_loop(row, draft[:length]) for row, draft, length in zip(sampled, drafts, lengths, strict=True)
    ]
    drafts_tensor = torch.tensor(drafts, dtype=torch.int64).view(len(drafts), -1)
    assert accepted_lengths(torch.tensor(sampled), drafts_tensor, torch.tensor(lengths)).tolist() == expected


def test_padding_that_agrees_is_not_accepted() -> None:
    sampled, drafts = torch.tensor([[5, 0, 0, 0]]), torch.tensor([[5, 0, 0]])
    assert accepted_lengths(sampled, drafts, torch.tensor([1])).tolist() == [1]
