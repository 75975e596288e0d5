"""Processors that depend on the text, in batches of different settings, against transformers'."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import probabilities, process, rank, sample
from decoding.sampling.shaping import (
    allow_tokens,
    bad_tokens,
    bad_words,
    ban_tokens,
    begin_suppressed_tokens,
    early_end_tokens,
    force_tokens,
    mask_by_grammar,
    repeated_ngrams,
    suppressed_tokens,
)
from tests.support.positions import SETTINGS, VOCAB, logits_of, params_of, paths, positions_of, processed, texts, tokens
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


def alone(position: Position, logits: Tensor) -> Tensor:
    """Process the logits of one position, [V]."""
    return process(logits[None], SamplingBatch.build([position], len(logits)))[0]


@repeatable
@given(st.data(), params_of(SETTINGS))
def test_equals_the_processors_that_generate_builds(data: st.DataObject, params: SamplingParams) -> None:
    history, path, _ = data.draw(positions_of(params))
    if params.forced_bos_token_id is not None:  # transformers forces it after one token only
        history = History(params, history.tokens[history.prompt_length - 1 :], 1)
    logits = data.draw(logits_of(1))[0]
    expected = processed(logits, [*history.tokens, *path], history.prompt_length, params)
    if expected is not None:
        ours = alone(Position(history, path), logits)
        if params.top_p < 1:  # which of several equal logits stay depends on transformers' unstable sort
            ours, expected = ours.sort().values, expected.sort().values
        assert torch.equal(ours, expected)


@settings(repeatable, max_examples=10, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data(), st.lists(params_of(), min_size=32, max_size=32))
def test_rows_of_other_settings_change_nothing(data: st.DataObject, requests: list[SamplingParams]) -> None:
    positions = [data.draw(positions_of(params)) for params in requests]
    logits = data.draw(logits_of(len(positions)))
    kept = logits.clone()
    batch = SamplingBatch.build(positions, VOCAB)
    singles = [(row[None], SamplingBatch.build([single], VOCAB)) for row, single in zip(logits, positions, strict=True)]
    assert torch.equal(process(logits, batch), torch.cat([process(*single) for single in singles]))
    assert torch.equal(probabilities(logits, batch), torch.cat([probabilities(*single) for single in singles]))
    assert torch.equal(sample(logits, batch), torch.cat([sample(*single) for single in singles]))
    assert torch.equal(rank(logits, batch, 3)[1], torch.cat([rank(*single, 3)[1] for single in singles]))
    assert torch.equal(logits, kept)
    assert_is_a_distribution(process(logits, batch), probabilities(logits, batch))


def assert_is_a_distribution(logits: Tensor, probs: Tensor) -> None:
    assert not logits.isnan().any()
    assert (logits.amax(dim=-1) > -inf).all()
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(len(probs)))
    assert (probs[logits == -inf] == 0).all()


@repeatable
@given(st.data(), params_of())
def test_a_draft_token_counts_as_a_committed_one(data: st.DataObject, params: SamplingParams) -> None:
    """Draft tokens count the same before and after they are committed."""
    history, path, allowed = data.draw(positions_of(params))
    logits = data.draw(logits_of(len(path) + 1))
    drafted = [Position(history, path[:depth], allowed) for depth in range(len(path) + 1)]
    together = process(logits, SamplingBatch.build(drafted, VOCAB))
    growing = History(params, [*history.tokens], history.prompt_length)
    for row, seen, token in zip(together, logits, [*path, 0], strict=True):
        whole = History(params, [*growing.tokens], history.prompt_length)
        assert torch.equal(row, alone(Position(whole, (), allowed), seen))
        assert torch.equal(row, alone(Position(growing, (), allowed), seen))
        growing.tokens.append(token)


def masked(*tokens: int) -> Tensor:
    return torch.tensor([sum(1 << token for token in tokens)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("asked", "allowed", "possible"),
    [
        ({"suppress_tokens": (0, 1, 2, 3)}, None, [0, 1, 2, 3]),
        ({"allowed_token_ids": (1, 2), "suppress_tokens": (1, 2)}, None, [1, 2]),
        ({"allowed_token_ids": (1, 2), "forced_bos_token_id": 3, "suppress_tokens": (3,)}, None, [3]),
        ({"forced_bos_token_id": 3}, masked(0, 1), [0, 1]),
        ({"forced_bos_token_id": 3}, masked(0, 3), [3]),
        ({"eos_token_ids": (2,), "min_tokens": 1}, masked(2), [2]),
        ({"allowed_token_ids": (1,), "suppress_tokens": (0, 2, 3)}, masked(), [0, 1, 2, 3]),
        ({"allowed_token_ids": (7, 9), "suppress_tokens": (8,)}, None, [0, 1, 2, 3]),  # a larger vocabulary's
        ({"suppress_tokens": (2,), "bad_words_ids": ((8,), (9, 1))}, None, [0, 3]),
    ],
)
def test_where_nothing_would_be_left_the_strongest_constraint_decides(
    asked: dict[str, tuple[int, ...]], allowed: Tensor | None, possible: list[int]
) -> None:
    for temperature in (0, 1):
        params = SamplingParams(max_tokens=5, temperature=temperature, **asked)  # type: ignore[arg-type]
        position = Position(History(params, [0, 9], 2), (), allowed)
        logits = torch.tensor([0.5, -1.0, 2.0, -inf])
        left = alone(position, logits)
        finite = (left > -inf).nonzero().flatten().tolist()
        assert finite == possible or finite == [token for token in possible if token != 3]
        assert sample(logits[None], SamplingBatch.build([position], 4)).item() in possible


def test_where_the_model_itself_rules_out_what_may_come_it_comes_evenly() -> None:
    params = SamplingParams(max_tokens=5, allowed_token_ids=(1, 2), suppress_tokens=(0, 1, 2, 3))
    logits = torch.tensor([1.0, -inf, -inf, 1.0])
    assert alone(Position(History(params, [0], 1)), logits).tolist() == [-inf, 0, 0, -inf]


def test_a_grammar_mask_may_be_shorter_or_longer_than_the_vocabulary() -> None:
    history = History(SamplingParams(max_tokens=5, temperature=0), [0], 1)
    words = torch.tensor([1 << 3, -(2**31), -1], dtype=torch.int32)
    for size, expected in [(70, [3, 63, *range(64, 70)]), (200, [3, 63, *range(64, 96)]), (40, [3])]:
        left = alone(Position(history, (), words), torch.zeros(size))
        assert (left > -inf).nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 3, "eos_token_ids": (1,)},
        {"forced_bos_token_id": 1},
        {"forced_eos_token_id": 1},
        {"begin_suppress_tokens": (1,)},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1},
    ],
)
def test_a_greedy_position_where_nothing_acts_takes_an_argmax_alone(asked: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, **asked)  # type: ignore[arg-type]
    batch = SamplingBatch.build([Position(History(params, [0] * 6, 3), [0] * depth) for depth in range(5)], VOCAB)
    assert batch.shaping is None
    assert not batch.used


class Counted(tuple[Any, ...]):
    """A tuple that counts its iterations."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("logit_bias", ((1, 2.0), (3, -1.0))),
        ("allowed_token_ids", (1, 2, 3)),
        ("suppress_tokens", (1, 2)),
        ("begin_suppress_tokens", (1, 2)),
        ("bad_words_ids", ((1,), (2, 3))),
    ],
)
def test_what_a_request_names_is_not_gone_through_at_each_step(field: str, named: tuple[Any, ...]) -> None:
    """Once or twice at its start, however many tokens follow."""
    counted = Counted(named)
    settings: dict[str, Any] = {field: counted}
    params = SamplingParams(max_tokens=99, temperature=0, **settings)
    counted.times = 0
    history = History(params, [0], 1)
    for _ in range(20):
        positions = [Position(history, [0] * depth) for depth in range(5)]
        process(torch.zeros(5, VOCAB), SamplingBatch.build(positions, VOCAB))
        history.tokens.append(0)
    assert counted.times <= 2


def banned(positions: list[Position], logits: Tensor) -> Tensor:
    lasting = (bad_tokens, early_end_tokens, suppressed_tokens, begin_suppressed_tokens)
    ban_ = ban_tokens((repeated_ngrams, bad_words), lasting, positions, logits.shape[-1], "cpu")
    if ban_:
        ban_(logits)
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


def always(allowed: tuple[int, ...]) -> Callable[[int, Tensor], list[int]]:
    return lambda _, __: list(allowed)


@repeatable
@given(st.data(), st.lists(st.one_of(st.just(()), SETTINGS["allowed_token_ids"]), min_size=1, max_size=5))
def test_allowed_tokens(data: st.DataObject, values: list[tuple[int, ...]]) -> None:
    logits = data.draw(logits_of(len(values)))
    expected = logits.clone()
    for row, value in enumerate(values):
        if value:
            processor = PrefixConstrainedLogitsProcessor(always(value), 1)
            expected[row] = processor(torch.tensor([[0]]), logits[row : row + 1])
    params = [SamplingParams(max_tokens=9, allowed_token_ids=value) for value in values]
    constrain_ = allow_tokens([Position(History(setting, [0], 1)) for setting in params], VOCAB, "cpu")
    if constrain_:
        constrain_(logits)
    assert torch.equal(logits, expected)


@repeatable
@given(st.data(), st.lists(st.tuples(*[st.one_of(st.none(), tokens)] * 2, st.integers(0, 3)), min_size=1, max_size=5))
def test_forced_tokens(data: st.DataObject, values: list[tuple[int | None, int | None, int]]) -> None:
    """The prompt has one token, as transformers' forced first token needs."""
    logits = data.draw(logits_of(len(values)))
    expected, positions = logits.clone(), []
    for row, (first, last, answered) in enumerate(values):
        params = SamplingParams(max_tokens=4, forced_bos_token_id=first, forced_eos_token_id=last)
        positions.append(Position(History(params, [0] * (answered // 2 + 1), 1), [0] * (answered - answered // 2)))
        ids = torch.zeros(1, 1 + answered, dtype=torch.int64)
        if first is not None:
            expected[row] = ForcedBOSTokenLogitsProcessor(first)(ids, expected[row : row + 1])
        if last is not None:
            expected[row] = ForcedEOSTokenLogitsProcessor(5, last)(ids, expected[row : row + 1])
    constrain_ = force_tokens(positions, VOCAB, "cpu")
    if constrain_:
        constrain_(logits)
    assert torch.equal(logits, expected)


@repeatable
@given(st.data(), st.lists(st.one_of(st.none(), st.sets(tokens)), min_size=1, max_size=5))
def test_grammar_masks(data: st.DataObject, sets: list[set[int] | None]) -> None:
    """The vocabulary takes two words of bits."""
    logits = data.draw(logits_of(len(sets), 40))
    params = SamplingParams(max_tokens=9)
    expected, positions = logits.clone(), []
    for row, allowed in enumerate(sets):
        words = None
        if allowed is not None:
            bits = [sum(1 << token for token in allowed), 1]
            words = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
            expected[row, [token for token in range(40) if token not in allowed | {32}]] = -torch.inf
        positions.append(Position(History(params, [0], 1), (), words))
    constrain_ = mask_by_grammar(positions, "cpu")
    if constrain_:
        constrain_(logits)
    assert torch.equal(logits, expected)
