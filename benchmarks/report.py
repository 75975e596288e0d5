"""Ratios, figures, and JSON results with the command, options, hardware and versions of the run."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios within repetitions. A long disturbance of the machine slows down both, so ratios keep."""
    return [value / other for value, other in zip(values, others, strict=True)]


def write(path: Path, module: str, options: Mapping[str, object], **findings: object) -> None:
    """Write findings as JSON, with the details of the run. module: the argument of `python -m`."""
    contents = {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "options": options,
        "hardware": _hardware(),
        "versions": _versions(),
        "commit": _commit(),
        **findings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "consort"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, object]:
    """Return the CPU, its number of cores, and the operating system."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": len(names), "system": platform.platform()}


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


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
    """Draw panels in rows of equal length. Needs matplotlib: the extra `bench`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(rows[0]), 5.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, panels in zip(axes, rows, strict=True):
        for each, panel in zip(row, panels, strict=True):
            _draw_panel(each, panel)
    figure.savefig(path, dpi=150)
    print(f"drawn to {path}")


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import NullFormatter

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
