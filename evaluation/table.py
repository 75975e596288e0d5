"""Metrics side by side, as plain text. Must not know how they were measured."""

from collections.abc import Mapping, Sequence

from evaluation.metrics import TextMetrics

_HEAD = ("tokens", "entropy-1", "entropy-2", "entropy-3", "distinct-1", "distinct-2", "repetition", "likelihood")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, each as wide as its widest cell: the first flush left, the others flush right.

    Raises:
        ValueError: a row has another number of cells than the head.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(row, widths) for row in (head, rule, *rows))


def metrics_table(
    metrics: Mapping[str, TextMetrics],
    more: Mapping[str, Sequence[str]] | None = None,
    more_head: Sequence[str] = (),
) -> str:
    """A row for each name, a column for each metric.

    Args:
        metrics: by the name of what wrote the texts.
        more: further cells of each row, by the same names, such as its speed.
        more_head: what stands above them.
    """
    rows = [(name, *_cells(found), *(more[name] if more else ())) for name, found in metrics.items()]
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
