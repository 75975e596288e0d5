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
        grid[1][column].set(xlabel="rate")
        timed = [time for time in times if time.prompt_tokens == length]
        if timed:
            _bars(grid[2][column], timed)
        elif times:
            grid[2][column].set_visible(False)
    grid[0][0].legend()
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, times: Sequence[FirstToken]) -> None:
    """Draw the seconds to the first token: a bar for each method, compression dark."""
    names = [time.method if time.rate == 1 else f"{time.method}\n{time.rate}" for time in times]
    axes.bar(names, [time.first_token_s for time in times], color="silver")
    axes.bar(names, [time.compress_s for time in times], color="dimgrey", label="compression")
    axes.legend()
    axes.set(ylabel="seconds to the first token")


def _lines(axes: Axes, outcomes: Iterable[Outcome], value: Callable[[Outcome], float]) -> None:
    """Draw the means by rate: a line for each method, which begins at the whole prompt's."""
    by_method: dict[str, dict[float, list[float]]] = {}
    for outcome in outcomes:
        by_method.setdefault(outcome.method, {}).setdefault(outcome.rate, []).append(value(outcome))
    whole = by_method.pop("none", {})
    for method, by_rate in by_method.items():
        points = sorted({**whole, **by_rate}.items())
        axes.plot([rate for rate, _ in points], [fmean(values) for _, values in points], "o-", label=method)
