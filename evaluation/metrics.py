"""Diversity, repetition and likelihood of generated texts.

A text is a sequence of tokens: ids, or words. Only texts in the same tokens, and of about the same length, can be
compared. A text with fewer than n tokens has no n-grams: its entropy, distinct-n and repetition are 0.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from typing import Any

_COLUMNS = {  # in the order of the metrics, with their formats
    "tokens": ".0f", "entropy-1": ".2f", "entropy-2": ".2f", "entropy-3": ".2f",
    "distinct-1": ".3f", "distinct-2": ".3f", "repetition": ".3f", "likelihood": ".2f",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMetrics:
    """Metrics of one text, or their means over several texts."""

    tokens: float
    entropy_1: float  # bits
    entropy_2: float  # bits
    entropy_3: float  # bits
    distinct_1: float  # 0…1
    distinct_2: float  # 0…1
    repetition: float  # 0…1, of 4-grams
    log_likelihood: float | None = None  # nats per token; None: unknown


def ngram_entropy(tokens: Sequence[Hashable], n: int) -> float:
    """Return the Shannon entropy of the text's own distribution of n-grams, in bits.

    Zhang et al., arXiv 1809.05972. At most the binary logarithm of the number of n-grams.
    """
    counts = _ngrams(tokens, n)
    total = counts.total()
    return sum(-count / total * math.log2(count / total) for count in counts.values())


def distinct(tokens: Sequence[Hashable], n: int) -> float:
    """Return the number of distinct n-grams as a share of all n-grams of the text: distinct-n.

    Li et al., arXiv 1510.03055.
    """
    counts = _ngrams(tokens, n)
    return len(counts) / counts.total() if counts else 0.0


def repetition(tokens: Sequence[Hashable], n: int = 4) -> float:
    """Return the share of n-grams that repeat an earlier one: seq-rep-n, Welleck et al., arXiv 1908.04319."""
    counts = _ngrams(tokens, n)
    return 1 - len(counts) / counts.total() if counts else 0.0


def measure(tokens: Sequence[Hashable], log_probs: Sequence[float] | None = None) -> TextMetrics:
    """Compute all metrics of one text. log_probs: one per token, from the judging model; None: no likelihood."""
    if log_probs is not None and len(log_probs) != len(tokens):
        raise ValueError(f"{len(log_probs)} log-probabilities for {len(tokens)} tokens; there must be one for each")
    return TextMetrics(
        tokens=len(tokens),
        entropy_1=ngram_entropy(tokens, 1),
        entropy_2=ngram_entropy(tokens, 2),
        entropy_3=ngram_entropy(tokens, 3),
        distinct_1=distinct(tokens, 1),
        distinct_2=distinct(tokens, 2),
        repetition=repetition(tokens),
        log_likelihood=None if log_probs is None else fmean(log_probs or [0.0]),
    )


def average(texts: Sequence[TextMetrics]) -> TextMetrics:
    """Average each metric over the texts, with equal weights. Without likelihood if any text has none."""
    if not texts:
        raise ValueError("no texts to average")
    columns = {each.name: [getattr(text, each.name) for text in texts] for each in fields(TextMetrics)}
    means: dict[str, Any] = {name: None if None in values else fmean(values) for name, values in columns.items()}
    return TextMetrics(**means)


def _ngrams(tokens: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = []
    for row in (head, rule, *rows):
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)


def metrics_table(
    metrics: Mapping[str, TextMetrics], more: Mapping[str, Sequence[str]] | None = None, more_head: Sequence[str] = ()
) -> str:
    """Format metrics, by who wrote the texts: a row each, a column for each metric, and further cells of the rows."""
    rows = []
    for name, text_metrics in metrics.items():
        values = zip(astuple(text_metrics), _COLUMNS.values(), strict=True)
        cells = ["–" if value is None else format(value, precision) for value, precision in values]
        rows.append([name, *cells, *(more[name] if more else ())])
    return table(("", *_COLUMNS, *more_head), rows)
