"""N-gram look-up against searches of the whole text."""

import random
from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts import lookup
from decoding.drafts.draft import NO_DRAFT
from decoding.drafts.lookup import MatchCalibration
from decoding.drafts.ngram import NgramLookup
from tests.support.properties import repeatable

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def naive_match(text: Sequence[int], longest: int) -> tuple[int, int]:
    for length in range(min(longest, len(text)), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return length, end
    return 0, 0


def growing(text: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Return prefixes of a text, the last of them the whole text."""
    return [list(text[: min(cut, len(text))]) for cut in sorted(cuts)] + [list(text)]


@pytest.mark.parametrize("slice_length", [1, 7, 40])
def test_a_long_text_is_indexed_in_slices_and_drafts_are_the_same(slice_length: int) -> None:
    rng = random.Random(slice_length)
    text = [rng.randrange(9) for _ in range(300)]
    whole, sliced = NgramLookup(3, capacity=300), NgramLookup(3, capacity=300)
    whole.read(text, len(text))
    expected = whole.propose(text)
    with mock.patch.object(lookup, "_MOST_NEW", slice_length):
        drafts = [sliced.propose(text) for _ in range(-(-299 // slice_length))]
        assert expected.tokens
        assert drafts == [NO_DRAFT] * (len(drafts) - 1) + [expected]
        early = NgramLookup(3, capacity=300)
        reads = [early.read(text, slice_length) for _ in range(len(drafts) + 1)]
        assert (max(reads), sum(reads), reads[-1]) == (slice_length, 299, 0)
        assert early.propose(text) == expected


@repeatable
@given(TEXTS, st.lists(st.integers(1, 30), max_size=5), st.integers(1, 4), st.integers(1, 6))
def test_a_draft_goes_on_as_the_text_did(text: list[int], cuts: list[int], longest: int, count: int) -> None:
    """After the longest and last match. The draft continues as if it were part of the text."""
    ngrams = NgramLookup(longest, capacity=30, draft_length=count)
    for state in growing(text, cuts):
        draft = ngrams.propose(state)
        length, end = naive_match(state, longest)
        expected = list(state)
        for index in range(end, end + count if length else end):
            expected.append(expected[index])
        assert draft.tokens == expected[len(state) :]
        assert draft.is_chain
        assert all(0 < probability < 1 for probability in draft.probabilities)


def test_probabilities_are_learned_by_length_of_the_match() -> None:
    calibration = MatchCalibration()
    assert calibration.probability(1) < calibration.probability(4) < calibration.probability(50) < 1
    for _ in range(500):
        calibration.note(1, right=False)
        calibration.note(2, right=True)
    assert calibration.probability(1) < 0.05
    assert calibration.probability(2) > 0.95


def test_it_learns_from_what_came() -> None:
    """Only the tokens up to the first wrong one count."""
    calibration = MatchCalibration()
    before = [calibration.probability(length) for length in range(1, 5)]
    ngrams = NgramLookup(1, capacity=9, calibration=calibration, draft_length=4)
    assert ngrams.propose([5, 1, 2, 3, 4, 5]).tokens == [1, 2, 3, 4]
    ngrams.propose([5, 1, 2, 3, 4, 5, 1, 2, 9])
    after = [calibration.probability(length) for length in range(1, 5)]
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] < before[2]
    assert after[3] == before[3]


@pytest.mark.parametrize("text", [[1], [1, 2, 3]])
def test_nothing_found_is_no_draft(text: list[int]) -> None:
    assert NgramLookup(4, capacity=3).propose(text) == NO_DRAFT
