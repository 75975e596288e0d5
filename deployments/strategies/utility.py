"""Utilities for minimum Bayes risk: how good a candidate is if a reference is right."""

from collections.abc import Callable

Utility = Callable[[str, str], float]  # (candidate, reference) -> utility, higher is better


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 1: chrF2 (Popović 2015, "chrF", WMT), by sacrebleu (arXiv 1804.08771)."""
    from sacrebleu import sentence_chrf  # slow to import and seldom needed

    return float(sentence_chrf(candidate, [reference]).score) / 100
