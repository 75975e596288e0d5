"""What drafts gain at best, where reading bounds steps and where arithmetic does."""

import math

import pytest

from benchmarks.step_budget.gains import Machine, Roofline, Setup


def gains(machine: Machine, acceptance: float) -> list[float]:
    """Gain of two draft tokens with one row and with 64."""
    roofline = Roofline(Setup("", machine, "tiny", vocab_size=32))
    return [roofline.gain(rows, 2, acceptance) for rows in (1, 64)]


def test_arithmetic_makes_every_token_of_a_draft_as_dear_as_one_of_the_text() -> None:
    assert gains(Machine(math.inf, 1.0), 0.5) == pytest.approx([1.75 / 3.1] * 2)
    assert gains(Machine(math.inf, 1.0), 1.0) == pytest.approx([3 / 3.1] * 2)


def test_reading_makes_it_nearly_free() -> None:
    assert gains(Machine(1.0, math.inf), 0.5) == pytest.approx([1.75 / 1.1] * 2, rel=0.01)
