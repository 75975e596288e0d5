"""Which of several candidates is the answer: pure functions. Knows nothing of models or of how candidates came to be.

Everywhere N candidates, each with its weight, which is its member's, and its log-likelihood by its own member.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from deployments.strategies.utility import Utility


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidates from best to worst, and why."""

    ranking: Sequence[int]  # [N]
    scores: Sequence[float]  # [N] what the ranking is by; ties go to the more likely one
    answers: Sequence[str | None] = ()  # [N] of a vote: what was extracted
    votes: Mapping[str, float] | None = None  # of a vote: the share of each answer, most first

    @property
    def winner(self) -> int:
        return self.ranking[0]

    @property
    def agreement(self) -> float | None:
        """Of a vote: the share of all votes that the winner has; 0 if nobody voted."""
        return None if self.votes is None else self.votes.get(self.answers[self.winner] or "", 0.0)


def by_score(scores: Sequence[float], likelihoods: Sequence[float]) -> Verdict:
    """The candidate with the highest score."""
    return Verdict(_ranking(scores, likelihoods), scores)


def majority(answers: Sequence[str | None], weights: Sequence[float], likelihoods: Sequence[float]) -> Verdict:
    """A candidate with the answer that has the greatest weight: the most likely one of them.

    Self-consistency: Wang et al., arXiv 2203.11171. A candidate without an answer has no vote; if all are, the most
    likely one wins.
    """
    voted: dict[str, float] = {}
    best: dict[str, float] = {}
    for answer, weight, likelihood in zip(answers, weights, likelihoods, strict=True):
        if answer is not None:
            voted[answer] = voted.get(answer, 0.0) + weight
            best[answer] = max(best.get(answer, likelihood), likelihood)
    total = sum(voted.values()) or 1.0
    shares = {answer: round(voted[answer] / total, 12) for answer in voted}  # equal votes are equal, however added up
    scores = [shares[answer] if answer is not None else 0.0 for answer in answers]
    among_equals = [best[answer] if answer is not None else float("-inf") for answer in answers]
    order = sorted(range(len(answers)), key=lambda i: (scores[i], among_equals[i], likelihoods[i]), reverse=True)
    return Verdict(order, scores, answers, dict(sorted(shares.items(), key=lambda item: -item[1])))


def minimum_risk(
    texts: Sequence[str], weights: Sequence[float], likelihoods: Sequence[float], utility: Utility
) -> Verdict:
    """The candidate of the highest utility, in expectation over the others taken as references.

    Minimum Bayes risk by sampling: Eikema and Aziz, arXiv 2108.04718, section 4. Costs N² calls of the utility at most.
    """
    value = cache(utility)

    def expected(i: int) -> float:
        others = [(weights[j], value(texts[i], texts[j])) for j in range(len(texts)) if j != i]
        total = sum(weight for weight, _ in others)
        return sum(weight * found for weight, found in others) / total if total else 0.0

    return by_score([expected(i) for i in range(len(texts))], likelihoods)


def _ranking(scores: Sequence[float], likelihoods: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (scores[i], likelihoods[i]), reverse=True)
