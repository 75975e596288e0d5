"""Judge an ensemble against its members, in words, also where mixing loses. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

_SIGNIFICANT = 2.0  # standard errors; a larger difference counts as significant


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of a measure between two contestants, text by text."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> "Difference":
        """Return values − others, paired by prompt and seed."""
        gaps = [value - other for value, other in zip(values, others, strict=True)]
        return cls(fmean(gaps), stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else float("inf"))

    @property
    def significant(self) -> bool:
        """Whether the difference is significant."""
        return abs(self.mean) > _SIGNIFICANT * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A sentence, and whether the ensemble wins; None if the difference is not significant."""

    gains: bool | None
    sentence: str


def judge_measure(what: str, ensemble: str, best: str, difference: Difference) -> Judgement:
    """Judge a measure where higher is better. best: the best contestant without mixing."""
    if not difference.significant:
        return Judgement(None, f"{what}: {ensemble} and {best} can't be told apart ({difference}).")
    if difference.mean > 0:
        return Judgement(True, f"{what}: {ensemble} gains over {best} ({difference}).")
    return Judgement(False, f"{what}: mixing loses; {best} is better than {ensemble} ({difference}).")


def judge_speed(ensemble: str, tokens_per_s: float, slowest: str, slowest_tokens_per_s: float) -> Judgement:
    """Compare with the slowest member alone, the best possible speed of an ensemble without speculation."""
    ratio = tokens_per_s / slowest_tokens_per_s
    return Judgement(ratio >= 1, f"speed: {ensemble} writes {ratio:.2f} times as fast as {slowest}.")
