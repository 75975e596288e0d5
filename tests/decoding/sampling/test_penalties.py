"""Biases and penalties, in batches of different settings, against transformers' processors and vLLM's formula."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from decoding.sampling.history import History, Position, Positions
from decoding.sampling.params import SamplingParams
from decoding.sampling.penalties import _SPARE, TOKEN_BYTES, LogitBias, Penalties, TextTable, TextTables
from decoding.sampling.transfer import copy_all
from tests.support.positions import OUR_SETTINGS, VOCAB, logits_of, paths, texts
from tests.support.properties import repeatable

contexts = st.tuples(texts, st.lists(st.integers(0, 3), max_size=5), paths)  # prompt, answer, draft tokens
ENTRY_BYTES = 12  # of an id and its count
PARAMS = SamplingParams(max_tokens=10_000)


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


def line_of(table: TextTable, history: History) -> dict[int, float]:
    """Return the tokens of a text's line with their counts, as they are on the device."""
    text = table.read(history)
    table.write(*copy_all("cpu", table.changes()))
    line = slice(text.start, text.start + len(text.index))
    return dict(zip(table.tokens[line].tolist(), table.counts[line].tolist(), strict=True))


def table_bytes(texts: int, distinct: int) -> float:
    """Return the most bytes that a table should take. distinct: the most tokens of a line."""
    return texts * (TOKEN_BYTES * distinct + 2.5 * _SPARE * ENTRY_BYTES)


def size_of(table: TextTable) -> int:
    return table.tokens.nbytes + table.counts.nbytes


def expected_line(history: History) -> dict[int, float]:
    answer = Counter(history.tokens[history.prompt_length :])
    return {token: answer[token] for token in history.tokens}


def begin(prompt: list[int]) -> History:
    return History(PARAMS, [*prompt], len(prompt))


@repeatable
@given(st.lists(texts, min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), texts), max_size=8))
def test_lines_grow_with_their_texts(prompts: list[list[int]], steps: list[tuple[int, list[int]]]) -> None:
    table, histories = TextTable(VOCAB, "cpu"), [begin(prompt) for prompt in prompts]
    for index, tokens in steps:
        history = histories[index % len(histories)]
        history.tokens.extend(tokens)
        assert line_of(table, history) == expected_line(history)
    assert [line_of(table, history) for history in histories] == [*map(expected_line, histories)]


def test_only_what_has_changed_is_sent() -> None:
    table, history = TextTable(VOCAB, "cpu"), begin([3, 1, 3])
    line_of(table, history)
    history.tokens.extend([1, 5, 1])
    table.read(history)
    entries, tokens, counts = table.changes()
    assert sorted(zip(tokens.tolist(), counts.tolist(), strict=True)) == [(1, 2.0), (5, 1.0)]
    assert len(set(entries.tolist())) == 2


def test_what_could_not_be_sent_is_sent_in_the_next_step() -> None:
    table, history = TextTable(VOCAB, "cpu"), begin([3, 1])
    table.read(history)
    table.changes()  # memory runs out before `write`
    history.tokens.append(1)
    assert line_of(table, history) == {3: 0, 1: 1}


def test_the_memory_of_a_line_is_used_again_once_its_text_is_gone() -> None:
    table, kept = TextTable(VOCAB, "cpu"), begin([1])
    for first in range(40):
        history = begin([first % VOCAB, 2])
        assert line_of(table, history) == expected_line(history)
        assert line_of(table, kept) == {1: 0}
        del history
    assert size_of(table) <= table_bytes(texts=2, distinct=2)


def test_one_long_text_does_not_lengthen_the_lines_of_others() -> None:
    table, short = TextTable(100_000, "cpu"), [begin([token]) for token in range(256)]
    histories = [*short, begin(list(range(70_000)))]
    for history in histories:
        table.read(history)
    table.write(*copy_all("cpu", table.changes()))
    assert size_of(table) < 1.6 * 12 * 70_000 + table_bytes(256, 1)
    del histories, history
    begun = begin(list(range(20_000)))  # which makes the table anew
    assert line_of(table, begun) == expected_line(begun)
    assert [line_of(table, history) for history in short] == [*map(expected_line, short)]


@repeatable
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 999), max_size=300)), max_size=30))
def test_a_table_is_never_larger_than_its_bound(steps: list[tuple[int, list[int]]]) -> None:
    """A step begins a text anew, and one in four goes on with it."""
    table, histories = TextTable(1000, "cpu"), [begin([0]) for _ in range(4)]
    for number, (index, tokens) in enumerate(steps):
        if number % 4:
            histories[index] = begin(tokens)
        else:
            histories[index].tokens.extend(tokens)
        before = size_of(table)
        assert line_of(table, histories[index]) == expected_line(histories[index])
        moved = before if size_of(table) != before else 0
        assert size_of(table) + moved <= table_bytes(texts=4, distinct=1000)


def test_a_table_has_room_for_many_long_texts() -> None:
    table = TextTable(100_000, "cpu")
    histories = [begin(list(range(first, first + 100 * (first + 1)))) for first in range(40)]
    for history in histories:
        table.read(history)
    table.write(*copy_all("cpu", table.changes()))
    assert [line_of(table, history) for history in histories] == [*map(expected_line, histories)]


def test_tokens_that_a_vocabulary_lacks_are_left_out() -> None:
    history = History(PARAMS, [VOCAB, 2, VOCAB + 1, 2], 2)
    assert line_of(TextTables().on("cpu", VOCAB), history) == {2: 1}
