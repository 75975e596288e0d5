"""Drafts from a predicted answer, such as a file of which the answer changes a line.

The answer is followed through the prediction. Where it leaves it, it is found again by its last tokens, near the place
that it left.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from decoding.drafts.draft import ProposerName
from decoding.drafts.lookup import Copy, Lookup, MatchCalibration

_MOST_PLACES = 3  # that the answer may go on from
_NEIGHBOURS = 24  # occurrences of a token on each side of the last place that are compared
_LONGEST = 16  # tokens that are compared
_ANCHORED = 4  # tokens in a row by which the answer is back in the prediction
_BEGIN = 8  # the beginning counts as a match of so many tokens
_BACKWARDS = 2  # how much farther a place behind counts than one ahead


class _Place(NamedTuple):
    position: int  # in the prediction, of the token that may be next
    length: int  # of the match before it


class Alignment:
    """Where a growing answer is in its prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = prediction
        self.places = [_Place(0, _BEGIN)]  # that the answer may go on from, the likeliest first
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # by token: the positions after it, rising
        for end, token in enumerate(prediction, 1):
            self._ends[token].append(end)
        self._last: list[int] = []  # tokens of the answer
        self._anchor = 0  # the position after the last tokens that were in both for sure
        self._matched = bytearray(len(prediction))  # 1: a token of the answer, too

    @property
    def matched(self) -> int:
        """How many tokens of the prediction are in the answer, in runs; less than four in a row may be chance."""
        return sum(self._matched)

    def follow(self, tokens: Sequence[int]) -> None:
        """Note the next tokens of the answer."""
        for token in tokens:
            self._last = [*self._last[1 - _LONGEST :], token]
            going_on = [
                _Place(position + 1, length + 1)
                for position, length in self.places
                if position < len(self.prediction) and self.prediction[position] == token
            ]
            self.places = going_on or self._search(token)
            end, length = self.places[0]
            if length >= _ANCHORED:
                start = max(end - length, 0)
                self._matched[start:end] = bytes([1]) * (end - start)
                self._anchor = end

    def _search(self, token: int) -> list[_Place]:
        """Find the answer's last tokens near the anchor. A token that is not there may replace one, or be inserted."""
        ends = self._ends.get(token, [])
        middle = bisect_left(ends, self._anchor)
        near = ends[max(middle - _NEIGHBOURS, 0) : middle + _NEIGHBOURS]
        places = sorted([_Place(end, self._common(end)) for end in near], key=self._distance)
        return places[:_MOST_PLACES] or [_Place(self._anchor + 1, 0), _Place(self._anchor, 0)]

    def _common(self, end: int) -> int:
        """Return how many tokens before a position are the answer's last ones."""
        most = min(len(self._last), end)
        return next((n for n in range(most) if self.prediction[end - 1 - n] != self._last[-1 - n]), most)

    def _distance(self, match: _Place) -> tuple[int, int]:
        ahead = match.position - self._anchor
        return -match.length, ahead if ahead >= 0 else -_BACKWARDS * ahead


class PredictionLookup(Lookup):
    """Drafts what follows in the prediction."""

    name: ProposerName = "prediction"

    def __init__(
        self, prediction: Sequence[int], prompt_length: int, *, draft_length: int, calibration: MatchCalibration
    ) -> None:
        super().__init__(calibration)
        self._alignment = Alignment(prediction)
        self._read = prompt_length
        self._draft_length = draft_length

    def read(self, tokens: Sequence[int], most: int) -> int:
        new = tokens[self._read : self._read + most]
        self._alignment.follow(new)
        self._read += len(new)
        return len(new)

    def find(self, tokens: Sequence[int]) -> list[Copy] | None:
        if self._read < len(tokens):
            return None
        prediction, count = self._alignment.prediction, self._draft_length
        places = self._alignment.places
        return [Copy(list(prediction[start : start + count]), length) for start, length in places]
