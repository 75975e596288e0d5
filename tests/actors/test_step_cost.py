"""The cost of a step: a curve measured at start, which never falls, and a factor learnt from steps."""

import pytest

from actors.runner import Runner
from actors.step_cost import StepCost, measure_step_cost
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


def test_steps_move_the_whole_curve() -> None:
    cost = StepCost([1, 5], [10.0, 20.0])
    cost.note(1, 50.0)
    assert cost(1) == pytest.approx(14.0)
    for _ in range(200):
        cost.note(5, 40.0)
    assert cost(5) == pytest.approx(40.0)
    assert cost(1) == pytest.approx(20.0)


def test_measures_a_real_model() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=1, max_length=64, max_query=9)
    cost = measure_step_cost(runner)
    assert 0 < cost(1) <= cost(9) < cost(90)
