"""Metrics side by side, as plain text. Must not know how they were measured."""

from collections.abc import Mapping, Sequence

from evaluation.metrics import TextMetrics

_HEAD = ("tokens", "entropy-1", "entropy-2", "entropy-3", "distinct-1", "distinct-2", "repetition", "likelihood")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns: the first flush left, the others flush right.

    Raises:
        ValueError: a row and the head differ in their number of cells.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(row, widths) for row in (head, rule, *rows))


def metrics_table(
    metrics: Mapping[str, TextMetrics],
    more: Mapping[str, Sequence[str]] | None = None,
    more_head: Sequence[str] = (),
) -> str:
    """Format metrics with a row for each name and a column for each metric.

    Args:
        metrics: by the name of the model or strategy that wrote the texts.
        more: further cells of each row, by the same names, such as its speed.
        more_head: headings of the further cells.
    """
    rows = [(name, *_cells(text_metrics), *(more[name] if more else ())) for name, text_metrics in metrics.items()]
    return table(("", *_HEAD, *more_head), rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _cells(metrics: TextMetrics) -> list[str]:
    entropies = (metrics.entropy_1, metrics.entropy_2, metrics.entropy_3)
    shares = (metrics.distinct_1, metrics.distinct_2, metrics.repetition)
    likelihood = "–" if metrics.log_likelihood is None else f"{metrics.log_likelihood:.2f}"
    return [
        f"{metrics.tokens:.0f}",
        *(f"{entropy:.2f}" for entropy in entropies),
        *(f"{share:.3f}" for share in shares),
        likelihood,
    ]
