"""Rank N candidates by score, vote or minimum Bayes risk: pure functions.

The weight of a candidate is its member's. Its log-likelihood is by its own member.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

Utility = Callable[[str, str], float]  # (candidate, reference) -> utility, higher is better


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 1: chrF2 (Popović 2015, "chrF", WMT), by sacrebleu (arXiv 1804.08771)."""
    from sacrebleu import sentence_chrf  # slow to import and seldom needed

    return float(sentence_chrf(candidate, [reference]).score) / 100


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates from best to worst, with their scores and votes."""

    order: Sequence[int]  # [N] indices, best first
    scores: Sequence[float]  # [N] ties go to the more likely candidate
    answers: Sequence[str | None] = ()  # [N] majority: extracted answers, None without one
    votes: Mapping[str, float] | None = None  # majority: the share of each answer, largest first

    @property
    def winner(self) -> int:
        return self.order[0]

    @property
    def agreement(self) -> float | None:
        """Share of all votes for the winner's answer; 0 if nobody voted, None without a vote."""
        return None if self.votes is None else self.votes.get(self.answers[self.winner] or "", 0.0)


def by_score(scores: Sequence[float], likelihoods: Sequence[float]) -> Ranking:
    """Rank by score, then by likelihood."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i], likelihoods[i]), reverse=True)
    return Ranking(order, scores)


def majority(answers: Sequence[str | None], weights: Sequence[float], likelihoods: Sequence[float]) -> Ranking:
    """Rank by the total weight of each answer, then by likelihood.

    Self-consistency: Wang et al., arXiv 2203.11171. A candidate without an answer has no vote. If nobody votes, the
    most likely candidate wins.
    """
    voted: dict[str, float] = {}
    best: dict[str, float] = {}
    for answer, weight, likelihood in zip(answers, weights, likelihoods, strict=True):
        if answer is not None:
            voted[answer] = voted.get(answer, 0.0) + weight
            best[answer] = max(best.get(answer, likelihood), likelihood)
    total = sum(voted.values()) or 1.0
    # rounded, so that ties do not depend on the order of addition
    shares = {answer: round(voted[answer] / total, 12) for answer in voted}
    scores = [shares[answer] if answer is not None else 0.0 for answer in answers]
    among_equals = [best[answer] if answer is not None else float("-inf") for answer in answers]
    order = sorted(range(len(answers)), key=lambda i: (scores[i], among_equals[i], likelihoods[i]), reverse=True)
    return Ranking(order, scores, answers, dict(sorted(shares.items(), key=lambda item: -item[1])))


def minimum_risk(
    texts: Sequence[str], weights: Sequence[float], likelihoods: Sequence[float], utility: Utility
) -> Ranking:
    """Rank by expected utility, with the other candidates as references.

    Minimum Bayes risk by sampling: Eikema and Aziz, arXiv 2108.04718, section 4. Calls the utility at most N² times.
    """
    value = cache(utility)

    def expected_utility(i: int) -> float:
        others = [(weights[j], value(texts[i], texts[j])) for j in range(len(texts)) if j != i]
        total = sum(weight for weight, _ in others)
        return sum(weight * score for weight, score in others) / total if total else 0.0

    return by_score([expected_utility(i) for i in range(len(texts))], likelihoods)
