"""Statistics in words."""

import pytest
from rich.console import Console

from cli.console.generation import Generation
from cli.console.summary import compared, difference, summary
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
