"""Choices from scores, whatever these are."""

import math

import pytest

from decoding.drafts.choice import DraftChoice


def test_impossible_tokens_are_left_out() -> None:
    assert DraftChoice.ranked([5.0, 7.0, 9.0], [1.5, 0.5, -math.inf]) == ([5, 7], 1.0, None)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_without_a_possible_token_it_is_a_guess(score: float) -> None:
    assert DraftChoice.ranked([5.0, 7.0], [score, score]) == ([0], 0.0, None)
