"""What is kept equals a slow reference, stays within the budget, and keeps what is forced."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.endpoints.selection import (
    CHUNK,
    SEGMENT,
    SMOOTHED,
    Piece,
    keep_chunks,
    keep_groups,
    keep_perplexity,
    keep_sentences,
    keep_tokens,
)
from tests.support.properties import repeatable


def pieces_of(sizes: list[int], *, forced: set[int] = frozenset(), per_group: int = 7) -> list[Piece]:  # type: ignore[assignment]
    return [
        Piece("x" * size, [0] * size, index in forced, index // (3 * per_group), index // per_group)
        for index, size in enumerate(sizes)
    ]


def tokens_in(pieces: list[Piece], kept: list[bool]) -> int:
    return sum(len(piece.tokens) for piece, keep in zip(pieces, kept, strict=True) if keep)


def slowly(scores: list[float], budget: int) -> list[bool]:
    """Choose single tokens segment by segment, by counting how many are better."""
    kept: list[bool] = []
    for start in range(0, len(scores), SEGMENT):
        segment = scores[start : start + SEGMENT]
        room = budget * (start + len(segment)) // len(scores) - sum(kept)
        for index, score in enumerate(segment):
            better = sum(other > score or (other == score and j < index) for j, other in enumerate(segment))
            kept.append(better < room)
    return kept


@repeatable
@given(st.integers(1, 700), st.integers(0, 700), st.integers(0, 10_000), st.integers(1, 50))
def test_tokens_are_those_of_the_reference(count: int, budget: int, seed: int, levels: int) -> None:
    drawn = random.Random(seed)
    scores = [drawn.randrange(levels) / levels for _ in range(count)]
    budget = min(budget, count)
    kept = keep_tokens(pieces_of([1] * count), scores, budget)
    assert kept == slowly(scores, budget)
    assert sum(kept) == budget


@repeatable
@given(st.lists(st.integers(1, 4), min_size=1, max_size=300), st.floats(0.05, 1), st.integers(0, 10_000))
def test_no_method_exceeds_the_budget_or_loses_what_is_forced(sizes: list[int], rate: float, seed: int) -> None:
    drawn = random.Random(seed)
    forced = {drawn.randrange(len(sizes))}
    pieces, scores = pieces_of(sizes, forced=forced), [drawn.random() for _ in sizes]
    budget = round(rate * sum(sizes))
    for keep in (keep_perplexity, keep_sentences):
        kept = keep(pieces, scores, budget)
        assert all(kept[index] for index in forced)
        largest = max(tokens_in(pieces, [piece.sentence == group for piece in pieces]) for group in range(43))
        assert tokens_in(pieces, kept) <= max(budget, 0) + largest
        assert kept == keep(pieces, scores, budget)


def test_the_best_groups_stay_whole() -> None:
    pieces = pieces_of([1] * 21)
    scores = [0.1] * 7 + [0.9] * 7 + [0.5] * 7
    groups = [piece.sentence for piece in pieces]
    assert keep_groups(pieces, scores, 14, groups) == [False] * 7 + [True] * 14
    assert keep_groups(pieces, scores, 7, groups) == [False] * 7 + [True] * 7 + [False] * 7


def test_paragraphs_that_say_little_go_before_any_token_of_others() -> None:
    pieces = pieces_of([1] * 84)
    scores = [0.1 + index % 2 if index < 21 else 2 + (index % 3) for index in range(84)]
    kept = keep_perplexity(pieces, scores, 30)
    assert not any(kept[:21])
    assert sum(kept) == 30


@pytest.mark.parametrize("seed", range(8))
def test_chunks_are_those_of_the_reference(seed: int) -> None:
    """Free stretches of 40 tokens between protected ones of 5; attention is smoothed, then chunks are ranked."""
    drawn = random.Random(seed)
    free = ([False] * 5 + [True] * 40) * 4
    attention = [drawn.random() for _ in free]
    budget = room = drawn.randrange(16, 120)
    pieces = [Piece("x", [0], False, 0, 0) for _ in free]
    means = [fmean(attention[max(0, i - SMOOTHED // 2) : i + SMOOTHED // 2 + 1]) for i in range(len(free))]
    spans = [
        (start + first, min(start + first + CHUNK, start + 45))
        for start in range(0, 180, 45)
        for first in range(5, 45, CHUNK)
    ]
    expected = {index for index, is_free in enumerate(free) if not is_free}
    for first, end in sorted(spans, key=lambda span: -fmean(means[slice(*span)])):
        if end - first <= room:
            expected |= set(range(first, end))
            room -= end - first
    kept = keep_chunks(pieces, attention, free, budget)
    assert {index for index, keep in enumerate(kept) if keep} == expected
