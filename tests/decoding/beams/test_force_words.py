"""Forced words: the automaton against its definition, the search against all texts with the words."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.beams.options import BeamOptions
from decoding.beams.search import BeamSearch, ForceWords
from decoding.errors import InvalidRequestError
from tests.support.beam_worlds import random_world, ranked, search, table, texts
from tests.support.properties import repeatable

END = 0
Words = tuple[tuple[tuple[int, ...], ...], ...]

phrases = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
word_lists = st.lists(st.lists(phrases, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


def contains(text: list[int], phrase: tuple[int, ...]) -> bool:
    return any(tuple(text[start : start + len(phrase)]) == phrase for start in range(len(text)))


def has_all(text: list[int], words: Words) -> bool:
    return all(any(contains(text, phrase) for phrase in word) for word in words)


def lacks(text: list[int], phrase: tuple[int, ...]) -> int:
    """Return the fewest tokens that complete the phrase."""
    done = max(n for n in range(len(phrase) + 1) if n == 0 or tuple(text[-n:]) == phrase[:n])
    return 0 if contains(text, phrase) else len(phrase) - done


@repeatable
@given(words=word_lists, text=st.lists(st.integers(0, 2), max_size=12))
def test_progress(words: Words, text: list[int]) -> None:
    force = ForceWords(words)
    progress = force.start
    for end in range(len(text) + 1):
        read = text[:end]
        assert force.missing_count(progress) == sum(min(lacks(read, phrase) for phrase in word) for word in words)
        for token in range(3):
            advances = any(
                any(
                    0 < lacks([*read, token], phrase) < lacks(read, phrase) or contains([*read, token], phrase)
                    for phrase in word
                )
                for word in words
                if not has_all(read, (word,))
            )
            assert not advances or token in force.next_tokens(progress)
        if end < len(text):
            progress = force.advance(progress, text[end])
    assert (force.missing_count(progress) == 0) == has_all(text, words)


CASES: list[Words] = [
    (((1,),),),
    (((1, 2),),),
    (((3, 3, 3),),),
    (((1, 2), (3,)),),
    (((1, 2), (2, 1, 1)),),
    (((1,),), ((2,),)),
    (((1, 2),), ((2, 3),)),
    (((1, 1),), ((1, 2),)),
    (((2,), (3, 1)), ((1, 3), (2, 2))),
]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("words", CASES, ids=str)
def test_wide_beams_find_the_best_of_all_texts_that_have_the_words(words: Words, length_penalty: float) -> None:
    for seed in range(4):
        world = random_world(seed, 4)
        options = BeamOptions(
            num_beams=128,
            num_return_sequences=5,
            length_penalty=length_penalty,
            early_stopping="never",
            force_words_ids=words,
        )
        best = search(world, options, max_tokens=4, end=END)
        expected = ranked(world, (text for text in texts(4, 4, END) if has_all(list(text), words)), length_penalty)[:5]
        assert [hypothesis.tokens for hypothesis in best] == [text for _, text in expected]
        assert [hypothesis.score for hypothesis in best] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize("words", CASES, ids=str)
def test_a_few_beams_find_texts_that_have_the_words(words: Words) -> None:
    """The search is never better than the best of all texts, and mostly as good."""
    optimal = 0
    for seed in range(20):
        world = random_world(100 + seed, 4)
        options = BeamOptions(num_beams=8, num_return_sequences=2, early_stopping="never", force_words_ids=words)
        best = search(world, options, max_tokens=5, end=END)
        expected = ranked(world, (text for text in texts(4, 5, END) if has_all(list(text), words)), 1.0)
        assert best
        assert all(has_all(hypothesis.tokens, words) for hypothesis in best)
        assert best[0].score <= expected[0][0] + 1e-5
        optimal += best[0].tokens == expected[0][1]
    assert optimal >= 12


@pytest.mark.parametrize("num_beams", [1, 2, 5])
def test_words_that_fill_the_answer(num_beams: int) -> None:
    """The words need exactly max_tokens tokens."""
    words = (((1, 2, 3),), ((4, 4),))
    for seed in range(20):
        options = BeamOptions(num_beams=num_beams, force_words_ids=words)
        (best,) = search(random_world(seed, 9), options, max_tokens=5, end=END)
        assert best.tokens in ([1, 2, 3, 4, 4], [4, 4, 1, 2, 3])


def test_two_banks_by_hand() -> None:
    """Two banks of one beam each, without and with the word: token 3 enters at once, despite its log-probability."""
    world = table(
        {(): [0.2, 0.5, 0.29, 0.01], (1,): [0.05, 0.05, 0.1, 0.8], (1, 3): [0.9, 0.05, 0.03, 0.02]},
        others=[0.7, 0.1, 0.1, 0.1],
    )
    steps: list[list[list[int]]] = []
    options = BeamOptions(num_beams=2, length_penalty=0.0, early_stopping="never", force_words_ids=(((3,),),))
    (best,) = search(world, options, max_tokens=3, end=END, steps=steps)
    assert steps[:2] == [[[1], [3]], [[1, 3], [1, 2]]]
    assert best.tokens == [1, 3, END]
    assert best.log_prob == pytest.approx(math.log(0.5 * 0.8 * 0.9))


def test_groups_and_draws_have_the_words_too() -> None:
    words = (((1, 2), (5,)), ((3, 3),))
    for seed in range(10):
        options = BeamOptions(
            num_beams=6, num_return_sequences=6, num_beam_groups=2, diversity_penalty=0.5, force_words_ids=words
        )
        best = search(random_world(seed, 7), options, max_tokens=8, end=END, seed=seed)
        assert best
        assert all(has_all(hypothesis.tokens, words) for hypothesis in best)


def test_words_that_cannot_be_are_refused() -> None:
    options = BeamOptions(num_beams=2, force_words_ids=(((5, 6, 7), (8, 9)), ((4,),)))
    options.check(max_tokens=3, end_token_ids=(END,))
    for max_tokens, ends in ((2, (END,)), (3, (6,))):
        with pytest.raises(InvalidRequestError, match="force_words") as caught:
            options.check(max_tokens=max_tokens, end_token_ids=ends)
        assert caught.value.field == "force_words"
    assert sorted(options.named_tokens()) == [4, 5, 6, 7, 8, 9]


def test_tokens_beyond_the_vocabulary_are_never_found() -> None:
    beams = BeamSearch(
        BeamOptions(num_beams=2, force_words_ids=(((9,), (2,)), ((1,),))), max_tokens=3, end_token_ids=[7]
    )
    while not beams.done:
        beams.advance(torch.stack([random_world(0, 4)(tuple(text)) for text in beams.live]))
    assert has_all(beams.best()[0].tokens, (((2,),), ((1,),)))
