"""The index of texts against searches of all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.kernels.matches import MatchIndex
from tests.support.properties import repeatable

TOKENS = st.integers(0, 2)
PARTS = st.lists(st.lists(TOKENS, min_size=1, max_size=9), max_size=12)


def naive(added: Sequence[int], text: Sequence[int], depth: int, window: int) -> tuple[int, int]:
    """Return the length of the longest match in the last tokens that were added, and its last end; (0, 0): none."""
    best, oldest = (0, 0), max(len(added) - window - 1, 0)
    for end in range(oldest + 1, len(added) + 1):
        most = min(depth, window, end - oldest, len(text))
        length = next((n for n in range(most) if added[end - 1 - n] != text[-1 - n]), most)
        if length and length >= best[0]:
            best = length, end
    return best


@repeatable
@given(PARTS, st.lists(TOKENS, max_size=10), st.integers(1, 8), st.sampled_from([5, 17, 1000]), st.integers(0, 6))
def test_it_finds_the_longest_and_newest_match_in_its_window(
    parts: list[list[int]], text: list[int], depth: int, window: int, count: int
) -> None:
    index, added = MatchIndex(window, depth), list[int]()
    for part in parts:
        index.add(part)
        added += part
        assert len(index) == min(len(added), window)
        length, end = naive(added, text, depth, window)
        match = index.find(text, count)
        assert (match.length, match.end if match.length else 0) == (length, end)
        assert match.following == (added[end : end + count] if length else [])


def test_what_followed_ends_with_its_text() -> None:
    index = MatchIndex(100, 8)
    for text in ([1, 2, 3, 4], [7, 2, 9]):
        index.add(text)
        index.end_text()
    assert index.find([5, 1, 2], 9) == (2, 2, [3, 4])
    assert index.find([2], 9) == (1, 7, [9])
    assert index.find([3, 4], 9) == (2, 4, [])
    assert index.find([4, 7], 9) == (1, 6, [2, 9])


@repeatable
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(TOKENS, max_size=9)), max_size=12), st.lists(TOKENS, max_size=10))
def test_owners_never_see_each_others_texts(texts: list[tuple[int, list[int]]], text: list[int]) -> None:
    """Whatever else is in the index, a search finds what it would find alone."""
    together, alone = MatchIndex(500, 6), {owner: MatchIndex(500, 6) for owner in range(4)}
    for owner, tokens in texts:
        for index, own in ((together, owner + 2**31), (alone[owner], 0)):
            index.add(tokens, own)
            index.end_text(own)
    for owner, index in alone.items():
        apart, mixed = index.find(text, 5), together.find(text, 5, owner + 2**31)
        assert (mixed.length, mixed.following) == (apart.length, apart.following)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_text_that_repeats_costs_no_more_than_another(period: int) -> None:
    """Positions after the same tokens replace each other, so trees stay small; this ends at once."""
    index = MatchIndex(200_000, 32)
    index.add([token % period for token in range(200_000)])
    assert index.find([token % period for token in range(50)], 3).length == 32
