"""Choices from scores, whatever these are, and probabilities that follow what was observed."""

import math

import pytest

from decoding.drafts.choices import RANKS, DraftChoice, RankCalibration


def test_impossible_tokens_are_left_out() -> None:
    assert DraftChoice.ranked([5.0, 7.0, 9.0], [1.5, 0.5, -math.inf]) == ([5, 7], 1.0, None)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_without_a_possible_token_it_is_a_guess(score: float) -> None:
    assert DraftChoice.ranked([5.0, 7.0], [score, score]) == ([0], 0.0, None)


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
