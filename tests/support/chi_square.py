"""Pearson's chi-square test of samples against a known distribution."""

import torch
from torch import Tensor


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Return the probability of counts at least this far from the expected ones; 0 if an impossible token was drawn.

    counts, probabilities: [V].
    """
    possible = probabilities > 0
    if int(counts[~possible].sum()) > 0:
        return 0.0
    observed = counts[possible].double()
    expected = observed.sum() * probabilities[possible].double() / probabilities[possible].double().sum()
    assert float(expected.min()) >= 5, "too few draws for a chi-square test"
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(observed) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def count(tokens: Tensor, vocab_size: int) -> Tensor:
    """Count how often each token was drawn, [V]. tokens: any shape, int64."""
    return torch.bincount(tokens.flatten(), minlength=vocab_size)
