"""Biases and penalties, in batches of different settings, against transformers' processors and vLLM's formula."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from decoding.sampling.history import History, Position, Positions
from decoding.sampling.params import SamplingParams
from decoding.sampling.penalties import LogitBias, Penalties
from decoding.sampling.text_table import TextTables
from tests.support.positions import OUR_SETTINGS, VOCAB, logits_of, paths, texts
from tests.support.properties import repeatable

contexts = st.tuples(texts, st.lists(st.integers(0, 3), max_size=5), paths)  # prompt, answer, draft tokens


def position_of(context: tuple[list[int], list[int], list[int]], params: SamplingParams) -> Position:
    prompt, answer, path = context
    return Position(History(params, [*prompt, *answer], len(prompt)), path)


def requests_of(positions: list[Position]) -> list[Positions]:
    return [Positions.gather([position]) for position in positions]


def ids_of(position: Position) -> Any:
    """Return the position's tokens, [1, T]."""
    return torch.tensor([[*position.history.tokens, *position.path]])


def by_vllm(logits: Tensor, position: Position, presence: float, frequency: float) -> Tensor:
    """Apply frequency and presence penalty to one position, token by token. logits: [V]"""
    answer = [*position.history.tokens, *position.path][position.history.prompt_length :]
    count = torch.tensor([answer.count(token) for token in range(len(logits))])
    return logits - torch.tensor(frequency) * count - torch.tensor(presence) * (count > 0)


@repeatable
@given(st.data(), st.lists(st.one_of(st.just(1.0), OUR_SETTINGS["repetition_penalty"]), min_size=1, max_size=5))
def test_repetition_penalty(data: st.DataObject, values: list[float]) -> None:
    params = [SamplingParams(max_tokens=20, repetition_penalty=value) for value in values]
    positions = [position_of(data.draw(contexts), settings) for settings in params]
    logits = data.draw(logits_of(len(values)))
    expected = [
        RepetitionPenaltyLogitsProcessor(value)(torch.tensor([[*position.history.tokens, *position.path]]), row[None])[
            0
        ]
        for value, position, row in zip(values, positions, logits, strict=True)
    ]
    penalties = Penalties.build(requests_of(positions), VOCAB, "cpu", TextTables())
    assert (penalties is None) == (set(values) == {1.0})
    if penalties:
        kept = logits.clone()
        before = penalties.apply_(logits)
        assert torch.equal(logits, torch.stack(expected))
        penalties.undo_(logits, before)
        assert torch.equal(logits, kept)


@repeatable
@given(st.data(), st.lists(st.tuples(st.sampled_from([0.0, -2.0, 0.3]), st.sampled_from([0.0, -0.7, 2.0])), min_size=1))
def test_presence_and_frequency_penalty(data: st.DataObject, values: list[tuple[float, float]]) -> None:
    params = [
        SamplingParams(max_tokens=20, presence_penalty=presence, frequency_penalty=frequency)
        for presence, frequency in values
    ]
    positions = [position_of(data.draw(contexts), settings) for settings in params]
    logits = data.draw(logits_of(len(values)))
    expected = [by_vllm(row, position, *value) for row, position, value in zip(logits, positions, values, strict=True)]
    penalties = Penalties.build(requests_of(positions), VOCAB, "cpu", TextTables())
    if penalties:
        penalties.apply_(logits)
    assert torch.equal(logits, torch.stack(expected))


@repeatable
@given(st.data(), contexts, OUR_SETTINGS["repetition_penalty"])
def test_repetition_penalty_comes_first(
    data: st.DataObject, context: tuple[list[int], list[int], list[int]], repetition: float
) -> None:
    params = SamplingParams(max_tokens=20, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=repetition)
    position = position_of(context, params)
    logits = data.draw(logits_of(1))
    repeated = RepetitionPenaltyLogitsProcessor(repetition)(ids_of(position), logits)[0]
    expected = by_vllm(repeated, position, 1.5, 0.5)
    penalties = Penalties.build(requests_of([position]), VOCAB, "cpu", TextTables())
    assert penalties is not None
    penalties.apply_(logits)
    assert torch.equal(logits[0], expected)


@repeatable
@given(st.data(), st.lists(st.one_of(st.just(()), OUR_SETTINGS["logit_bias"]), min_size=1, max_size=5))
def test_logit_bias(data: st.DataObject, biases: list[tuple[tuple[int, float], ...]]) -> None:
    params = [SamplingParams(max_tokens=20, logit_bias=bias) for bias in biases]
    logits = data.draw(logits_of(len(biases)))
    expected = logits.clone()
    for row, bias in enumerate(biases):
        if bias:
            processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias])
            expected[row] = processor(torch.tensor([[0]]), logits[row : row + 1])
    step = LogitBias.build([Positions(History(settings, [0], 1)) for settings in params], VOCAB, "cpu")
    if step:
        step.apply_(logits)
    assert torch.equal(logits, expected)


def test_tokens_that_a_smaller_vocabulary_lacks_are_left_out() -> None:
    params = SamplingParams(max_tokens=20, logit_bias=((1, 2.0), (VOCAB, 5.0), (1, 3.0)), presence_penalty=1.0)
    positions = [Position(History(params, [VOCAB + 3, 2], 0), [VOCAB, 3])]
    logits = torch.zeros(1, VOCAB)
    requests = requests_of(positions)
    steps = LogitBias.build(requests, VOCAB, "cpu"), Penalties.build(requests, VOCAB, "cpu", TextTables())
    for step in steps:
        assert step is not None
        step.apply_(logits)
    assert logits[0].tolist() == [0, 3, -1, -1, *[0] * (VOCAB - 4)]
