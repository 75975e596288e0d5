"""Drafts from a predicted answer: how many steps an edit takes, and where the answer is found again."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts.draft import NO_DRAFT
from decoding.drafts.lookup import MatchCalibration
from decoding.drafts.prediction import Alignment, PredictionLookup
from tests.support.properties import repeatable

PROMPT = [1, 2, 3]
NEWLINE = 9
RNG = random.Random(1)


def line() -> list[int]:
    return [RNG.randrange(10, 14), *(RNG.randrange(20, 60) for _ in range(RNG.randrange(3, 12))), NEWLINE]


def flat(lines: Sequence[Sequence[int]]) -> list[int]:
    return [token for each in lines for token in each]


LINES = [line() for _ in range(60)]
FILE = flat(LINES)
EDITS = {
    "nothing": LINES,
    "a line is changed": [*LINES[:30], line(), *LINES[31:]],
    "a line is new": [*LINES[:30], line(), *LINES[30:]],
    "two lines are gone": [*LINES[:30], *LINES[32:]],
    "a line is moved": [*LINES[:10], *LINES[11:30], LINES[10], *LINES[30:]],
    "it begins with a sentence": [[70, 71, 72, 73, NEWLINE], *LINES],
}


def steps(prediction: Sequence[int], answer: Sequence[int], draft_length: int) -> int:
    """Return how many steps a target that writes the answer takes."""
    lookup = PredictionLookup(prediction, len(PROMPT), draft_length=draft_length, calibration=MatchCalibration())
    text, count = list(PROMPT), 0
    while len(text) < len(PROMPT) + len(answer):
        draft, rest = lookup.propose(text), answer[len(text) - len(PROMPT) :]
        paths, accepted = {*draft.paths()}, 0
        while tuple(rest[: accepted + 1]) in paths and accepted < len(rest) - 1:
            accepted += 1
        text += rest[: accepted + 1]
        count += 1
    return count


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("draft_length", "most"), [(4, 0.25), (16, 0.09), (32, 0.06)])
def test_an_edited_file_takes_a_fraction_of_the_steps(edit: str, draft_length: int, most: float) -> None:
    answer = flat(EDITS[edit])
    assert len(FILE) > 500
    assert steps(FILE, answer, draft_length) <= most * len(answer)


def test_an_unrelated_answer_takes_a_step_per_token() -> None:
    assert steps(FILE, [100, 101] * 40, 8) == 80


@pytest.mark.parametrize(
    ("prediction", "answer", "matched"),
    [
        (FILE, FILE, len(FILE)),
        (FILE, flat(EDITS["two lines are gone"]), len(FILE) - len(LINES[30] + LINES[31])),
        (FILE, [100] * 50, 0),
        (FILE, [100, *FILE], len(FILE)),
        ([], FILE, 0),
        (FILE, [], 0),
        ([5], [5], 1),
        ([5, 6, 7, 8], [5, 6, 7, 8, 5, 6, 7, 8], 4),
    ],
)
def test_tokens_of_the_prediction_that_are_in_the_answer(
    prediction: list[int], answer: list[int], matched: int
) -> None:
    alignment = Alignment(prediction)
    alignment.follow(answer)
    assert alignment.matched == pytest.approx(matched, abs=4)
    assert alignment.matched <= len(prediction)


@repeatable
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_copies_follow_what_they_claim_to_match(prediction: list[int], answer: list[int]) -> None:
    """And how the answer was cut makes no difference."""
    alignment, by_token = Alignment(prediction), Alignment(prediction)
    alignment.follow(answer)
    for token in answer:
        by_token.follow([token])
    assert alignment.places == by_token.places
    assert alignment.matched == by_token.matched
    for position, length in alignment.places:
        common = min(length, position, len(answer), 16)
        assert prediction[position - common : position] == answer[len(answer) - common :]


def test_a_long_answer_of_another_replica_is_read_in_slices() -> None:
    answer = [token % 50 for token in range(1000)]
    lookup = PredictionLookup(answer, len(PROMPT), draft_length=4, calibration=MatchCalibration())
    text = [*PROMPT, *answer[:900]]
    drafts = [lookup.propose(text) for _ in range(4)]
    assert drafts[:3] == [NO_DRAFT] * 3
    assert drafts[3].tokens == answer[900:904]
    assert drafts[3].is_chain
