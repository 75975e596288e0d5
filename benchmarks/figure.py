"""Draws figures of panels with curves. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

matplotlib.use("Agg")


@dataclass(frozen=True, slots=True)
class Curve:
    """A labelled line through points."""

    label: str
    x: Sequence[float]  # empty: a level at the first y, from edge to edge
    y: Sequence[float]
    ranges: Sequence[tuple[float, float]] = ()  # least and most, drawn as bars
    colour: str | None = None
    style: str = "-"


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one quantity."""

    title: str
    x_label: str
    curves: Sequence[Curve]
    log: bool = False


def draw(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Draw panels in rows of equal length."""
    figure = Figure(figsize=(6.0 * len(rows[0]), 5.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, panels in zip(axes, rows, strict=True):
        for each, panel in zip(row, panels, strict=True):
            _draw_panel(each, panel)
    figure.savefig(path, dpi=150)
    print(f"drawn to {path}")


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        if curve.x:
            below = [middle - least for middle, (least, _) in zip(curve.y, curve.ranges, strict=False)]
            above = [most - middle for middle, (_, most) in zip(curve.y, curve.ranges, strict=False)]
            bars = [below, above] if curve.ranges else None
            look: dict[str, Any] = {"marker": "o", "capsize": 3, "color": curve.colour, "linestyle": curve.style}
            axes.errorbar(curve.x, curve.y, yerr=bars, label=curve.label, **look)
        else:
            axes.axhline(curve.y[0], color=curve.colour, linestyle=curve.style, label=curve.label)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    if panel.log:
        axes.set_xscale("log")
        ticks = sorted({x for curve in panel.curves for x in curve.x})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
