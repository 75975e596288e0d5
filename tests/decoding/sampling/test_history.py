"""Incremental indices of a text equal those computed from the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from tests.support.positions import paths, texts
from tests.support.properties import repeatable

growth = st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4)


def history_of(prompt: list[int], **settings: int) -> History:
    return History(SamplingParams(max_tokens=100, **settings), [*prompt], len(prompt))  # type: ignore[arg-type]


@repeatable
@given(texts, growth, st.integers(1, 4), st.integers(0, 5))
def test_followers_are_those_of_the_whole_text(prompt: list[int], steps: list[list[int]], size: int, most: int) -> None:
    """Also if a part of it was indexed before."""
    history = history_of(prompt, no_repeat_ngram_size=size)
    for step in steps:
        history.ngrams.update(most)
        text = history.tokens
        ngrams = {tuple(text[start : start + size]) for start in range(len(text) - size + 1)}
        for prefix in {ngram[:-1] for ngram in ngrams} | {(9,) * (size - 1)}:
            expected = {ngram[-1] for ngram in ngrams if ngram[:-1] == prefix}
            assert set(history.ngrams.continuations(prefix)) == expected
        text.extend(step)


@repeatable
@given(texts, paths, st.integers(0, 20))
def test_a_position_knows_where_it_is_and_what_is_before_it(prompt: list[int], path: list[int], count: int) -> None:
    history = history_of(prompt)
    history.tokens.append(8)
    position = Position(history, path)
    assert position.index == len(prompt) + 1 + len(path)
    assert position.answer_length == 1 + len(path)
    assert position.tail(count) == ([*prompt, 8, *path][-count:] if count else [])


def test_what_nobody_asks_for_is_not_made() -> None:
    history = history_of([1, 2, 3])
    history.read_ahead()
    assert history.__dict__.keys() == {"params", "tokens", "prompt_length"}
