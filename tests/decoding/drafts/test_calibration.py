"""Calibration follows the observed ranks of a drafter's choices."""

import math

import pytest

from decoding.drafts.calibration import RANKS, RankCalibration


def test_at_first_a_clear_choice_is_trusted_more_than_an_unclear_one() -> None:
    calibration = RankCalibration()
    best = [calibration.probabilities(gap)[0] for gap in (0.0, 1.2, 5.0, math.inf)]
    assert best == sorted(best)
    for gap in (0.0, 1.2, 5.0):
        probabilities = calibration.probabilities(gap)
        assert len(probabilities) == RANKS
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) < 1


def test_probabilities_follow_what_was_seen_at_such_gaps_and_no_other() -> None:
    calibration = RankCalibration()
    before = calibration.probabilities(3.5)
    for _ in range(500):
        for rank in (0, 1, 1, 1, None):
            calibration.note(0.7, rank)
    assert calibration.probabilities(0.8) == pytest.approx([0.2, 0.6, 0.0], abs=0.02)
    assert min(calibration.probabilities(0.8)) > 0
    assert calibration.probabilities(3.5) == before
