"""Plots the simulator's results. Needs matplotlib: the extra `bench`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

matplotlib.use("Agg")

Point = Mapping[str, Any]


def draw(answers: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw a row of panels per pair."""
    pairs = list(dict.fromkeys(point["pair"] for point in answers["ratios"]))
    figure = Figure(figsize=(20, 4.8 * len(pairs)), layout="constrained")
    panels = figure.subplots(len(pairs), 4, squeeze=False)
    for row, pair in zip(panels, pairs, strict=True):
        of_pair = {name: [point for point in points if point["pair"] == pair] for name, points in answers.items()}
        _speed_ups(row[0], of_pair["ratios"], lambda point: point["drafters"] / point["targets"], "drafters per target")
        row[0].set_title(f"{pair} pair, 8 targets: speed-up over plain decoding")
        _speed_ups(row[1], of_pair["links"], lambda point: 1e3 * point["link_s"], "one way, ms")
        row[1].set_title(f"{pair} pair: speed-up by distance")
        _sizes(row[2], of_pair)
        _coordinators(row[3], of_pair["coordinators"])
        for axes in row:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _speed_ups(axes: Axes, points: Sequence[Point], abscissa: Callable[[Point], float], label: str) -> None:
    for streams in dict.fromkeys(point["streams"] for point in points):
        chosen = [point for point in points if point["streams"] == streams]
        plain = next(point["tokens_per_s"] for point in chosen if not point["drafters"])
        drafted = [point for point in chosen if point["drafters"]]
        speed_ups = [point["tokens_per_s"] / plain for point in drafted]
        axes.plot(
            [abscissa(point) for point in drafted], speed_ups, marker="o", label=f"{streams} stream(s) per target"
        )
    axes.axhline(1.0, color="#7f7f7f", linestyle="--")
    axes.set_xlabel(label)
    axes.legend(fontsize="small")


def _sizes(axes: Axes, of_pair: Mapping[str, Sequence[Point]]) -> None:
    for name, label in (("sizes", "a coordinator per 5 targets"), ("one_coordinator", "one coordinator")):
        points = of_pair[name]
        rates = [point["tokens_per_s"] / point["targets"] / points[0]["tokens_per_s"] for point in points]
        axes.plot([point["targets"] for point in points], rates, marker="o", label=label)
    axes.set_title("tokens/s per target, of one alone")
    axes.set_xlabel("targets, 4 streams and a drafter each")
    axes.legend(fontsize="small")


def _coordinators(axes: Axes, points: Sequence[Point]) -> None:
    counts = [point["coordinators"] for point in points]
    most = max(point["tokens_per_s"] for point in points)
    axes.plot(counts, [point["tokens_per_s"] / most for point in points], marker="o", label="tokens/s, of the most")
    axes.plot(counts, [point["coordinator_use"] for point in points], marker="s", label="share of a core, each")
    axes.set_title("100 targets")
    axes.set_xlabel("coordinators")
    axes.legend(fontsize="small")
