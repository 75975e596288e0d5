"""The cost of a step: means where steps were seen, straight lines in between."""

import pytest

from actors.step_cost import StepCost


def test_interpolates_between_the_sizes_seen() -> None:
    cost = StepCost()
    cost.note(1, 10.0)
    cost.note(5, 18.0)
    assert [cost(tokens) for tokens in (1, 2, 3, 5)] == [10.0, 12.0, 14.0, 18.0]


def test_extrapolates_in_proportion() -> None:
    cost = StepCost()
    cost.note(4, 8.0)
    assert cost(8) == 16.0
    assert cost(1) == 8.0


def test_follows_slow_changes_and_shrugs_off_an_outlier() -> None:
    cost = StepCost()
    cost.note(1, 1.0)
    cost.note(1, 5.0)
    assert cost(1) == pytest.approx(1.4)
    for _ in range(100):
        cost.note(1, 2.0)
    assert cost(1) == pytest.approx(2.0, rel=1e-3)


def test_large_sizes_share_means() -> None:
    cost = StepCost()
    for tokens in range(1, 2000):
        cost.note(tokens, float(tokens))
    assert len(cost._sizes) < 80
    assert cost(1500) == pytest.approx(1500, rel=0.1)
