"""How good a candidate would be if a reference were right: what minimum Bayes risk maximises in expectation."""

from collections.abc import Callable

Utility = Callable[[str, str], float]  # of a candidate, given a reference; the greater, the better

DEFAULT_UTILITY = f"{__name__}:chrf"


def chrf(candidate: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 1: chrF2 (Popović 2015, "chrF", WMT), as sacrebleu has it (arXiv 1804.08771)."""
    from sacrebleu import sentence_chrf  # takes a while to import, and few need it

    return float(sentence_chrf(candidate, [reference]).score) / 100
