"""Forbidden tokens, in batches of different settings, against transformers' processors; end tokens as in vLLM."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from decoding.sampling.bans import (
    Bans,
    bad_tokens,
    bad_words,
    begin_suppressed_tokens,
    early_end_tokens,
    repeated_ngrams,
    suppressed_tokens,
)
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from tests.support.positions import SETTINGS, logits_of, paths, texts
from tests.support.properties import repeatable

ENDS = (2, 5)
# Transformers' processor from a setting and the length of the prompt.
THEIRS: dict[str, Callable[[Any, int], LogitsProcessor]] = {
    "no_repeat_ngram_size": lambda size, _: NoRepeatNGramLogitsProcessor(size),
    "bad_words_ids": lambda words, _: NoBadWordsLogitsProcessor([list(word) for word in words], list(ENDS)),
    "min_tokens": lambda count, prompt: MinNewTokensLengthLogitsProcessor(prompt, count, list(ENDS)),
    "suppress_tokens": lambda tokens, _: SuppressTokensLogitsProcessor(tokens),
    "begin_suppress_tokens": SuppressTokensAtBeginLogitsProcessor,
}


def banned(positions: list[Position], logits: Tensor) -> Tensor:
    lasting = (bad_tokens, early_end_tokens, suppressed_tokens, begin_suppressed_tokens)
    bans = Bans.build((repeated_ngrams, bad_words), lasting, positions, logits.shape[-1], "cpu")
    if bans:
        bans.apply_(logits)
    return logits


@pytest.mark.parametrize("field", THEIRS)
def test_equals_transformers(field: str) -> None:
    @repeatable
    @given(st.data(), st.lists(st.one_of(st.none(), SETTINGS[field]), min_size=1, max_size=5))
    def same(data: st.DataObject, values: list[Any]) -> None:
        logits = data.draw(logits_of(len(values)))
        expected, positions = logits.clone(), []
        for row, value in enumerate(values):
            prompt, answer, path = data.draw(texts), data.draw(paths), data.draw(paths)
            settings = {} if value is None else {field: value}
            params = SamplingParams(max_tokens=20, eos_token_ids=ENDS, **settings)
            positions.append(Position(History(params, [*prompt, *answer], len(prompt)), path))
            if value is not None:
                ids = torch.tensor([[*prompt, *answer, *path]])
                expected[row] = THEIRS[field](value, len(prompt))(ids, logits[row : row + 1])
        assert torch.equal(banned(positions, logits), expected)

    same()


def possible(params: SamplingParams, answer: list[int], path: list[int]) -> list[int]:
    """Return the tokens below 6 that may follow the prompt [0], the answer and the path."""
    logits = banned([Position(History(params, [0, *answer], 1), path)], torch.zeros(1, 6))
    return (logits[0] == 0).nonzero().flatten().tolist()


def test_every_token_that_ends_an_answer_waits_for_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, eos_token_ids=(2,), stop_token_ids=(3, 70))
    assert possible(params, [], [1]) == [0, 1, 4, 5]
    assert possible(params, [1], [1]) == [0, 1, 2, 3, 4, 5]


def test_what_is_forbidden_at_the_beginning_is_so_after_a_forced_beginning() -> None:
    params = SamplingParams(max_tokens=9, forced_bos_token_id=1, begin_suppress_tokens=(0, 1, 2))
    assert possible(params, [], []) == [0, 1, 2, 3, 4, 5]
    assert possible(params, [], [1]) == [3, 4, 5]
    assert possible(params, [1, 3], []) == [0, 1, 2, 3, 4, 5]


def test_ngrams_within_a_draft_count() -> None:
    params = SamplingParams(max_tokens=9, no_repeat_ngram_size=2)
    assert possible(params, [], [1, 2, 1]) == [0, 1, 3, 4, 5]
    assert possible(params, [1], [0]) == [0, 2, 3, 4, 5]
