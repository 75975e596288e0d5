"""What is said of an ensemble: also that it loses, and that it can't be told."""

import pytest

from evaluation.comparison import Difference, judge_measure, judge_speed


@pytest.mark.parametrize(
    ("values", "others", "gains", "words"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.3], True, "e gains over m"),
        ([1.0, 1.1, 1.3], [2.0, 2.1, 2.2], False, "mixing loses; m is better than e"),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.1], None, "can't be told apart"),
        ([1.0], [3.0], None, "can't be told apart"),
        ([1.0, 1.0], [1.0, 1.0], None, "can't be told apart"),
    ],
)
def test_differences_are_called_what_they_are(
    values: list[float], others: list[float], gains: bool | None, words: str
) -> None:
    judgement = judge_measure("distinct-2", "e", "m", Difference.of(values, others))
    assert judgement.gains is gains
    assert words in judgement.sentence


def test_slower_is_slower() -> None:
    assert judge_speed("e", 50, "m", 100).gains is False
    assert "0.50 times as fast as m" in judge_speed("e", 50, "m", 100).sentence
    assert judge_speed("e", 150, "m", 100).gains is True
