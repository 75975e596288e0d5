"""Plots tokens per second and time to first token against streams. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.serving.findings import OFF, ON, VLLM, LoadComparison

matplotlib.use("Agg")

_COLOURS = {ON: "#d62728", OFF: "#1f77b4", VLLM: "#2ca02c"}


def draw(comparisons: Sequence[LoadComparison], path: Path) -> None:
    """Draw two panels side by side, in a row per temperature."""
    temperatures = list(dict.fromkeys(comparison.temperature for comparison in comparisons))
    figure = Figure(figsize=(12.8, 4.8 * len(temperatures)), layout="constrained")
    panels = figure.subplots(len(temperatures), 2, squeeze=False)
    for row, temperature in zip(panels, temperatures, strict=True):
        chosen = [comparison for comparison in comparisons if comparison.temperature == temperature]
        _panel(row[0], chosen, "tokens_per_s", f"tokens/s, temperature {temperature:g}")
        _panel(row[1], chosen, "ttft_p50_ms", f"time to first token, ms, median, temperature {temperature:g}")
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, comparisons: Sequence[LoadComparison], quantity: str, title: str) -> None:
    streams = [comparison.concurrency for comparison in comparisons]
    for name in comparisons[0].repetitions:
        medians = [comparison.median(name, quantity) for comparison in comparisons]
        ranges = [
            [getattr(measured, quantity) for measured in comparison.repetitions[name]] for comparison in comparisons
        ]
        below = [middle - min(values) for middle, values in zip(medians, ranges, strict=True)]
        above = [max(values) - middle for middle, values in zip(medians, ranges, strict=True)]
        axes.errorbar(streams, medians, yerr=[below, above], marker="o", capsize=3, color=_COLOURS[name], label=name)
    axes.set_title(title)
    axes.set_xlabel("streams at once (bars: least and most)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(streams, list(map(str, streams)))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
