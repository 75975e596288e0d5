"""Draws what compression costs and gives, by rate. Measures nothing."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.compression.accuracy import Outcome
from benchmarks.compression.first_token import FirstToken


def draw(outcomes: Sequence[Outcome], times: Sequence[FirstToken], path: Path) -> None:
    """Draw a column for each length: the retrieval score, the likelihood, and the seconds if they were measured."""
    lengths = sorted({outcome.prompt_tokens for outcome in outcomes} | {time.prompt_tokens for time in times})
    rows = 2 + bool(times)
    figure = Figure(figsize=(4 * len(lengths), 3 * rows), layout="constrained")
    grid = figure.subplots(rows, len(lengths), squeeze=False)
    for column, length in enumerate(lengths):
        here = [outcome for outcome in outcomes if outcome.prompt_tokens == length]
        _lines(grid[0][column], here, lambda outcome: float(outcome.retrieved))
        _lines(grid[1][column], here, lambda outcome: outcome.log_likelihood)
        grid[0][column].set(title=f"{length} tokens", ylabel="retrieved", ylim=(-0.05, 1.05))
        grid[1][column].set(ylabel="log-likelihood, nats per token")
        if times:
            for method in dict.fromkeys(result.method for result in times):
                line = [t for t in times if (t.prompt_tokens, t.method) == (length, method)]
                grid[2][column].plot([t.rate for t in line], [t.first_token_s for t in line], "o-", label=method)
            grid[2][column].set(ylabel="seconds to the first token", ylim=(0, None))
        grid[-1][column].set(xlabel="rate")
    grid[0][0].legend()
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, outcomes: Iterable[Outcome], value: Callable[[Outcome], float]) -> None:
    """Draw the means by rate: a line for each method, which begins at the whole prompt's."""
    by_method: dict[str, dict[float, list[float]]] = {}
    for outcome in outcomes:
        by_method.setdefault(outcome.method, {}).setdefault(outcome.rate, []).append(value(outcome))
    whole = by_method.pop("none", {})
    for method, by_rate in by_method.items():
        points = sorted({**whole, **by_rate}.items())
        axes.plot([rate for rate, _ in points], [fmean(values) for _, values in points], "o-", label=method)
