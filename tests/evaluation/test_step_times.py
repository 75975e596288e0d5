"""Measured steps: more tokens never take less time, whatever a noisy machine says."""

import pytest

from evaluation.limits import SpeculationLimits
from evaluation.step_times import never_falling


def test_times_that_rise_stay_as_they_are() -> None:
    times = {(1, 1): 1.0, (1, 2): 1.5, (4, 1): 0.5, (4, 3): 0.5}
    assert never_falling(times) == times


def test_neighbours_in_the_wrong_order_become_their_mean() -> None:
    times = {(1, 5): 3.0, (1, 1): 9.0, (1, 2): 3.0, (1, 3): 2.0, (4, 1): 7.0}
    fitted = never_falling(times)
    assert fitted == {(1, 5): 4.25, (1, 1): 4.25, (1, 2): 4.25, (1, 3): 4.25, (4, 1): 7.0}
    assert list(fitted) == list(times)


def test_no_speed_up_exceeds_the_tokens_of_a_step() -> None:
    fitted = never_falling({(1, 1): 0.08, (1, 5): 0.01})  # a hiccup while plain steps were timed
    limits = SpeculationLimits(4, fitted[1, 1], fitted[1, 5], draft_step_s=0.0, tokens_per_step=1.76)
    assert limits.hidden == pytest.approx(1.76)
