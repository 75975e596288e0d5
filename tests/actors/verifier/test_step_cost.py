"""The cost of a step: a curve measured at the start, which never falls, and factors learned from steps."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from actors.verifier import step_cost
from actors.verifier.step_cost import StepCost, measure_step_cost
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model


def test_interpolates_between_the_sizes_measured() -> None:
    cost = StepCost([1, 5], [10.0, 18.0])
    assert [cost(tokens) for tokens in (1, 2, 3, 5)] == [10.0, 12.0, 14.0, 18.0]


def test_beyond_the_last_size_costs_in_proportion() -> None:
    cost = StepCost([4], [8.0])
    assert cost(8) == 16.0
    assert cost(1) == 8.0


def test_more_tokens_never_cost_less() -> None:
    cost = StepCost([1, 2, 3], [10.0, 14.0, 12.0])
    assert [cost(tokens) for tokens in (1, 2, 3)] == [10.0, 14.0, 14.0]


def test_padding_costs_what_tokens_do() -> None:
    cost = StepCost([1, 5, 9], [10.0, 18.0, 22.0], padded=[5, 9])
    assert [cost(tokens) for tokens in (1, 5, 6, 9, 18)] == [18.0, 18.0, 22.0, 22.0, 44.0]
    for _ in range(50):
        cost.note(6, 44.0)
    assert cost(7) == pytest.approx(44.0, rel=0.01)


def test_steps_correct_their_own_size_at_once_and_the_others_in_time() -> None:
    cost = StepCost([1, 5], [10.0, 20.0])
    for _ in range(50):
        cost.note(5, 40.0)
    assert cost(5) == pytest.approx(40.0, rel=0.01)
    assert cost(1) < 12.0
    for _ in range(2000):
        cost.note(5, 40.0)
    assert cost(1) == pytest.approx(20.0, rel=0.01)


def test_measures_a_real_model() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=1, max_length=64, max_query=9)
    cost = measure_step_cost(runner)
    assert 0 < cost(1) <= cost(9) < cost(90)


def test_measures_the_sizes_of_graphs() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=64, max_query=16)
    runner.use_graphs(capture=lambda run: run)
    assert list(runner.padded_sizes) == [2, 4, 8, 16, 24, 32, 48]
    cost = measure_step_cost(runner)
    assert cost(9) == cost(16)


class TimedRunner:
    """Takes as long as it is told by a clock of its own."""

    padded_sizes: Sequence[int] = ()
    max_query, device, practises_later = 200, torch.device("cpu"), False

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now_s, self.cache = seconds, 0.0, Mock()
        self.sizes: list[int] = []

    def logits(self, rows: Sequence[RowInput]) -> torch.Tensor:
        tokens = len(rows[0].tokens)
        self.sizes.append(tokens)
        self.now_s += self.seconds(tokens)
        return torch.zeros(tokens, 2)

    def record(self, tokens: int, slot: int) -> None:
        pass


def use_clock_of(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        def __init__(self, device: torch.device) -> None:
            self.began_s = runner.now_s

        def stop(self) -> None:
            self.ended_s = runner.now_s

        def seconds(self) -> float:
            return float(self.ended_s - self.began_s)

    monkeypatch.setattr(step_cost, "StepTimer", Timer)


@pytest.mark.parametrize(
    ("seconds", "longest", "cost_of_200"),
    [
        (lambda tokens: 0.01 * tokens, 17, 2.0),
        (lambda tokens: 0.0001 * tokens, 129, 0.02),  # short
        (lambda tokens: 0.3 + 0.001 * tokens, 129, 0.429 * 200 / 129),  # most of it for the weights
        (lambda tokens: max(0.3, 0.01 * tokens), 65, 2.0),
    ],
)
def test_long_steps_are_not_measured_where_their_time_is_known(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], longest: int, cost_of_200: float
) -> None:
    runner: Any = TimedRunner(seconds)

    use_clock_of(runner, monkeypatch)
    cost = measure_step_cost(runner)
    assert max(runner.sizes) == longest
    assert cost(200) == pytest.approx(cost_of_200)


def test_a_size_never_costs_more_than_several_smaller_steps() -> None:
    """A step that took 30 times as long as one of half the size was delayed by something else."""
    cost = StepCost([1, 2, 4], [6.0, 180.0, 12.0])
    assert [cost(tokens) for tokens in (1, 2, 4)] == [6.0, 12.0, 12.0]


def test_similar_sizes_without_steps_follow_soon() -> None:
    """What slows down all steps must not make drafts look dear, or cheap."""
    cost = StepCost([1, 3, 33], [10.0, 12.0, 100.0])
    for _ in range(100):
        cost.note(1, 20.0)
    assert cost(3) / cost(1) == pytest.approx(1.2, rel=0.06)
    assert cost(33) < 150.0
    for _ in range(100):
        cost.note(1, 20.0)
        cost.note(3, 20.0)
    assert cost(3) == pytest.approx(cost(1), rel=0.01)


def test_a_size_whose_times_differ_is_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else takes the cores during all early steps of two tokens and more."""

    def seconds(tokens: int) -> float:
        count = runner.sizes.count(tokens)
        return 0.18 / count if tokens > 1 and count < 3 else 0.006

    runner: Any = TimedRunner(seconds)
    runner.max_query = 5
    use_clock_of(runner, monkeypatch)
    cost = measure_step_cost(runner)
    assert cost(5) == pytest.approx(0.006)
