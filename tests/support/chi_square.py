"""Pearson's chi-square test, for samples against a distribution that is known."""

import torch
from torch import Tensor


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """The probability of counts at least this far from the expected ones. Both [V]; probabilities may hold zeros.

    A token of probability 0 that was drawn makes it 0.
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
    """How often each token was drawn. tokens: any shape, int64; returns [V]."""
    return torch.bincount(tokens.flatten(), minlength=vocab_size)
