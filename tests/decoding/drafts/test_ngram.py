"""N-gram look-up against searches of the whole text."""

import random
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts import ngram
from decoding.drafts.draft import Draft
from decoding.drafts.lookup import MatchCalibration
from decoding.drafts.ngram import NgramProposer, NgramStore, TextIndex
from decoding.drafts.trie import DraftTrie
from tests.support.properties import repeatable

TOKENS = st.integers(0, 3)
TEXTS = st.lists(TOKENS, min_size=1, max_size=30)


def naive_match(text: Sequence[int], longest: int) -> tuple[int, int]:
    for length in range(min(longest, len(text)), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return length, end
    return 0, 0


def growing(text: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """Return prefixes of a text, the last of them the whole text."""
    return [list(text[: min(cut, len(text))]) for cut in sorted(cuts)] + [list(text)]


@repeatable
@given(TEXTS, st.lists(st.integers(1, 30), max_size=5), st.integers(1, 4))
def test_the_index_finds_the_longest_and_last_match(text: list[int], cuts: list[int], longest: int) -> None:
    index = TextIndex(longest)
    for state in growing(text, cuts):
        index.update(state, len(state))
        assert index.match(state) == naive_match(state, longest)


@pytest.mark.parametrize("slice_length", [1, 7, 40])
def test_a_long_text_is_indexed_in_slices_and_drafts_are_the_same(slice_length: int) -> None:
    rng = random.Random(slice_length)
    text = [rng.randrange(9) for _ in range(300)]
    whole, sliced = NgramProposer(3), NgramProposer(3)
    whole.read(text, len(text))
    expected = whole.propose(text)
    with mock.patch.object(ngram, "_MOST_NEW", slice_length):
        drafts = [sliced.propose(text) for _ in range(-(-299 // slice_length))]
        assert expected.tokens
        assert drafts == [Draft([], [])] * (len(drafts) - 1) + [expected]
        early = NgramProposer(3)
        reads = [early.read(text, slice_length) for _ in range(len(drafts) + 1)]
        assert (max(reads), sum(reads), reads[-1]) == (slice_length, 299, 0)
        assert early.propose(text) == expected


def test_a_proposal_indexes_a_bounded_part_of_a_text() -> None:
    """Counted, because times depend on the machine."""

    class Counting(list[int]):
        read = 0

        def __getitem__(self, key: Any) -> Any:
            item = super().__getitem__(key)
            Counting.read += len(item) if isinstance(key, slice) else 1
            return item

    text = Counting(index % 50_000 for index in range(100_000))
    proposer = NgramProposer(draft_length=3)
    for length in (40_000, 59_000, 1000):
        Counting.read = 0
        assert proposer.propose(text) == Draft([], [])
        assert Counting.read < 2000
        proposer.read(text, length)
    assert proposer.propose(text).tokens == [0, 1, 2]


def test_of_many_occurrences_the_last_are_compared() -> None:
    """The longest match is too far back; the last of the shorter ones counts."""
    text = [9, 1, 2, 5, *[8, 1, 2, 6] * 256, 9, 1, 2]
    index = TextIndex(3)
    index.update(text, len(text))
    assert index.match(text) == (2, len(text) - 4)
    assert naive_match(text, 3) == (3, 3)


def test_the_index_of_a_long_text_is_small() -> None:
    rng = random.Random(0)
    text = [rng.randrange(50_000) for _ in range(32_000)]
    tracemalloc.start()
    index = TextIndex(4)
    index.update(text, len(text))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 32_000 * 160  # where hardly a pair occurs twice; n-grams of each length took 400


@repeatable
@given(TEXTS, st.lists(st.integers(1, 30), max_size=5), st.integers(1, 4), st.integers(1, 6))
def test_a_draft_goes_on_as_the_text_did(text: list[int], cuts: list[int], longest: int, count: int) -> None:
    """The draft continues as if it were part of the text."""
    proposer = NgramProposer(longest, draft_length=count)
    for state in growing(text, cuts):
        draft = proposer.propose(state)
        length, end = naive_match(state, longest)
        expected = list(state)
        for index in range(end, end + count if length else end):
            expected.append(expected[index])
        assert draft.tokens == expected[len(state) :]
        assert draft.is_chain
        assert all(0 < probability < 1 for probability in draft.probabilities)


@repeatable
@given(st.lists(st.tuples(TEXTS, st.integers(0, 5)), max_size=4), st.integers(1, 3), TEXTS)
def test_a_store_counts_what_followed(texts: list[tuple[list[int], int]], longest: int, context: list[int]) -> None:
    store = NgramStore(longest)
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text, start in texts:
        store.add(text, start)
        for index in range(max(start, 1), len(text)):
            for length in range(1, min(longest, index) + 1):
                counts[tuple(text[index - length : index])][text[index]] += 1
    known = [n for n in range(min(longest, len(context)), 0, -1) if tuple(context[-n:]) in counts]
    length, continuations = store.continuations(context, 2)
    assert length == (known[0] if known else 0)
    if known:
        of_context = counts[tuple(context[-length:])]
        assert sorted(of_context.values(), reverse=True)[:2] == [of_context[token] for token in continuations]
        assert len(set(continuations)) == len(continuations)


def test_a_store_forgets_what_was_used_longest_ago() -> None:
    store = NgramStore(1, capacity=3)
    for token in (1, 2, 3):
        store.add([token, 100 + token], 1)
    assert store.continuations([1], 1) == (1, [101])
    store.add([4, 104], 1)
    assert len(store) == 3
    assert store.continuations([2], 1) == (0, [])
    assert store.continuations([1], 1) == (1, [101])


def test_a_flood_of_followers_is_bounded_and_the_frequent_stay() -> None:
    store = NgramStore(1)
    for token in range(1000):
        store.add([7, 1, 7, token], 1)
    assert store.continuations([7], 1000)[1][0] == 1
    assert len(store.continuations([7], 1000)[1]) <= 8


def test_answers_are_shared_and_prompts_are_not() -> None:
    store = NgramStore(2)
    first = NgramProposer(2, store=store)
    first.propose([1, 2, 3])
    assert not store.continuations([1], 1)[0]
    first.propose([1, 2, 3, 4, 5])
    assert NgramProposer(2, store=store, draft_length=2).propose([9, 3]).tokens == [4, 5]


def test_text_and_store_make_a_tree() -> None:
    store = NgramStore(2)
    store.add([1, 2, 8, 9], 1)
    draft = NgramProposer(2, store=store, draft_length=2).propose([1, 2, 5, 6, 1, 2])
    assert (draft.tokens, draft.parents) == ([5, 6, 8, 9], [-1, 0, -1, 2])
    store.add([1, 2, 5, 7], 2)
    store.add([1, 2, 5, 7], 2)
    draft = NgramProposer(2, store=store, draft_length=2).propose([1, 2, 5, 6, 1, 2])
    assert (draft.tokens, draft.parents) == ([5, 6, 7], [-1, 0, 0])
    assert DraftTrie([1, 2, 5, 6, 1, 2]).offer(6, draft.tokens, draft.parents, draft.probabilities)


def test_probabilities_are_learned_by_length_of_the_match() -> None:
    calibration = MatchCalibration()
    assert calibration.probability(1) < calibration.probability(4) < calibration.probability(50) < 1
    for _ in range(500):
        calibration.note(1, right=False)
        calibration.note(2, right=True)
    assert calibration.probability(1) < 0.05
    assert calibration.probability(2) > 0.95


def test_a_proposer_learns_from_what_came() -> None:
    """Only the tokens up to the first wrong one count."""
    calibration = MatchCalibration()
    before = [calibration.probability(length) for length in range(1, 5)]
    proposer = NgramProposer(1, calibration=calibration, draft_length=4)
    assert proposer.propose([5, 1, 2, 3, 4, 5]).tokens == [1, 2, 3, 4]
    proposer.propose([5, 1, 2, 3, 4, 5, 1, 2, 9])
    after = [calibration.probability(length) for length in range(1, 5)]
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] < before[2]
    assert after[3] == before[3]


@pytest.mark.parametrize("text", [[1], [1, 2, 3]])
def test_nothing_found_is_no_draft(text: list[int]) -> None:
    assert NgramProposer(4, store=NgramStore()).propose(text) == Draft([], [])
