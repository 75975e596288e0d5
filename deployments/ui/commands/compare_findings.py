"""What a comparison of an ensemble with its members says, in words: also where mixing loses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

_SURE = 2.0  # standard errors from which on a difference is called one


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one measure between two contestants, text by text."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> "Difference":
        """values − others, paired by prompt and seed."""
        gaps = [value - other for value, other in zip(values, others, strict=True)]
        return cls(fmean(gaps), stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else float("inf"))

    @property
    def sure(self) -> bool:
        """Whether it is more than chance."""
        return abs(self.mean) > _SURE * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One sentence, and whether it speaks for the ensemble; None: it can't be told."""

    gains: bool | None
    sentence: str


def judge_measure(what: str, ensemble: str, best: str, difference: Difference) -> Judgement:
    """Of a measure that should be high. best: the contestant without mixing that does best."""
    if not difference.sure:
        return Judgement(None, f"{what}: {ensemble} and {best} can't be told apart ({difference}).")
    if difference.mean > 0:
        return Judgement(True, f"{what}: {ensemble} gains over {best} ({difference}).")
    return Judgement(False, f"{what}: mixing loses; {best} is better than {ensemble} ({difference}).")


def judge_speed(ensemble: str, tokens_per_s: float, slowest: str, slowest_tokens_per_s: float) -> Judgement:
    """Beside the slowest member alone, which is the best that an unspeculated ensemble can do."""
    ratio = tokens_per_s / slowest_tokens_per_s
    return Judgement(ratio >= 1, f"speed: {ensemble} writes {ratio:.2f} times as fast as {slowest}.")
