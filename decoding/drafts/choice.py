"""A proposer's choice of one draft token. Knows nothing of models."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from decoding.drafts.draft import Distribution


class DraftChoice(NamedTuple):
    """A proposer's choice of a token, which may follow others that it drafted."""

    tokens: Sequence[int]  # best first
    gap: float  # how clear the choice is, see `RankCalibration`
    drawn_from: Distribution | None = None  # for a choice drawn at random

    @classmethod
    def ranked(cls, tokens: Sequence[float], scores: Sequence[float]) -> "DraftChoice":
        """Build a choice from at least two tokens and their scores, best first; −∞: impossible.

        Where none is possible, or scores are no numbers, it is a guess.
        """
        possible = [int(token) for token, score in zip(tokens, scores, strict=True) if score > -math.inf]
        return cls(possible, scores[0] - scores[1]) if possible else cls([0], 0.0)
