"""A table that is kept from step to step holds what the whole texts say."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decoding.sampling.history import History
from decoding.sampling.params import SamplingParams
from decoding.sampling.text_table import _ENTRY_BYTES, _SPARE, TOKEN_BYTES, TextTable, TextTables
from decoding.sampling.transfer import copy_all
from tests.support.positions import VOCAB, texts
from tests.support.properties import repeatable

PARAMS = SamplingParams(max_tokens=10_000)


def line_of(table: TextTable, history: History) -> dict[int, float]:
    """Return the tokens of a text's line with their counts, as they are on the device."""
    text = table.read(history)
    table.write(*copy_all("cpu", table.changes()))
    line = slice(text.start, text.start + len(text.index))
    return dict(zip(table.tokens[line].tolist(), table.counts[line].tolist(), strict=True))


def table_bytes(texts: int, distinct: int) -> float:
    """Return the most bytes that a table should take. distinct: the most tokens of a line."""
    return texts * (TOKEN_BYTES * distinct + 2.5 * _SPARE * _ENTRY_BYTES)


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
