"""Statistics below an answer, and the sources of its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.console.generation import Attribution, Generation, TextSpan
from cli.console.printer import compared, difference, summary
from tests.cli.conftest import shown

SPECULATION = {"steps": 4, "drafted": 0, "accepted": 0, "acceptance_rate": 0.0, "acceptance_length": 1.0}


def test_a_plain_answer(terminal: Console) -> None:
    generation = Generation("x", "length", tokens=1, total_s=0.5, first_s=0.25, speculation=SPECULATION)
    terminal.print(summary(generation, colours=True))
    assert "1 token · 2.0 tokens/s · first after 250 ms · ended by length" in shown(terminal)
    assert "nothing drafted · 1.00 tokens per step" in shown(terminal)


def test_a_stopped_answer_of_another_server(terminal: Console) -> None:
    terminal.print(summary(Generation("x", stopped=True), colours=True))
    assert "stopped" in shown(terminal)


@pytest.mark.parametrize(("left", "right", "index"), [("abc", "abd", 2), ("ab", "abc", 2), ("", "a", 0), ("a", "a", 1)])
def test_where_texts_differ(left: str, right: str, index: int) -> None:
    assert difference(left, right) == index


def test_verdicts(terminal: Console) -> None:
    ours = Generation("one two", tokens=8, total_s=1.0, seed=5, speculation=SPECULATION | {"drafted": 8})
    slow = Generation("one two", tokens=8, total_s=2.0, seed=5, speculation=SPECULATION)
    terminal.print(compared(ours, slow))
    assert "2.00 times as fast · seed 5" in shown(terminal)
    idle = Generation("one two", tokens=8, total_s=3.0, seed=5, speculation=SPECULATION)
    terminal.print(compared(idle, slow))
    assert "nothing was drafted, as plain decoding is faster at this load" in " ".join(shown(terminal).split())
    terminal.print(compared(ours, Generation("one too")))
    assert "same text: no" in shown(terminal)
    assert "from character 5 on: 'one two', target alone 'one too'" in shown(terminal)
    terminal.print(compared(Generation("a"), Generation("a")))
    assert shown(terminal).count("same text: yes") == 3


SOURCES = ("accepted", "recovered", "bonus", "plain")
TOKENS = st.lists(st.tuples(st.text("aé\n", max_size=3), st.sampled_from(SOURCES)), max_size=8)


def details(tokens: list[tuple[str, str]]) -> list[dict[str, object]]:
    return [{"id": 0, "text": text, "source": source} for text, source in tokens]


@given(tokens=TOKENS, data=st.data())
def test_every_character_gets_its_tokens_source(tokens: list[tuple[str, str]], data: st.DataObject) -> None:
    text = "".join(text for text, _ in tokens)
    held_back = data.draw(st.integers(0, len(text)))
    attribution = Attribution()
    pieces = attribution.split(text[:held_back], details(tokens)) + attribution.split(text[held_back:], [])
    expected = [(character, source) for text, source in tokens for character in text]
    assert [(character, piece.source) for piece in pieces for character in piece.text] == expected
    assert attribution.counts.total() == len(tokens)


def test_text_that_does_not_match_has_no_source_and_is_all_there() -> None:
    attribution = Attribution()
    pieces = attribution.split("né!", details([("n", "plain"), ("\ufffd", "bonus"), ("!", "accepted")]))
    assert pieces == [TextSpan("n", "plain"), TextSpan("é!", "")]
    assert attribution.split(" so", details([(" so", "bonus")])) == [TextSpan(" so", "bonus")]


def test_without_details_there_are_no_sources() -> None:
    assert Attribution().split("text", ()) == [TextSpan("text", "")]
    assert Attribution().split("", ()) == []
