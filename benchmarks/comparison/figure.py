"""Plots tokens per second against draft length. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.findings import Score
from benchmarks.comparison.run import Comparison
from benchmarks.peers.contestant import Kind

matplotlib.use("Agg")

_COLOURS: dict[Kind, str] = {
    "hf": "#7f7f7f",
    "hf-assisted": "#bcbd22",
    "vllm": "#2ca02c",
    "alternation": "#ff7f0e",
    "plain": "#1f77b4",
    "fixed": "#d62728",
    "adaptive": "#d62728",
    "colocated": "#9467bd",
}
_PLAIN: tuple[Kind, ...] = ("hf", "vllm", "plain")  # drawn as solid lines
_SHIFT = 0.06  # tokens between curves, so that their bars do not overlap


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw a panel per comparison: a row per temperature, a column per number of streams."""
    temperatures = sorted({comparison.temperature for comparison in comparisons})
    streams = sorted({comparison.streams for comparison in comparisons})
    figure = Figure(figsize=(6.4 * len(streams), 5.6 * len(temperatures)), layout="constrained")
    panels = figure.subplots(len(temperatures), len(streams), squeeze=False)
    for comparison in comparisons:
        _panel(panels[temperatures.index(comparison.temperature)][streams.index(comparison.streams)], comparison)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, comparison: Comparison) -> None:
    for score in comparison.scores:
        if score.draft_length is None:
            style = "-" if score.kind in _PLAIN else "--"
            axes.axhline(score.median, color=_COLOURS[score.kind], linestyle=style, label=score.name)
    for index, group in enumerate(dict.fromkeys(score.group for score in comparison.scores)):
        scores = [score for score in comparison.scores if score.group == group and score.draft_length is not None]
        _curve(axes, index * _SHIFT, scores)
    axes.set_title(f"{comparison.streams} stream(s), temperature {comparison.temperature:g}")
    axes.set_xlabel("draft length γ")
    axes.set_ylabel("tokens/s, median (bars: least and most)")
    lengths = {score.draft_length for score in comparison.scores if score.draft_length is not None}
    axes.set_xticks(sorted(lengths))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _curve(axes: Axes, shift: float, scores: Sequence[Score]) -> None:
    """Draw medians over γ, with the spread as bars. shift: to the right, in tokens."""
    if not scores:
        return
    scores = sorted(scores, key=lambda score: score.draft_length or 0)
    medians = [score.median for score in scores]
    below = [score.median - min(score.tokens_per_s) for score in scores]
    above = [max(score.tokens_per_s) - score.median for score in scores]
    axes.errorbar(
        [(score.draft_length or 0) + shift for score in scores],
        medians,
        yerr=[below, above],
        color=_COLOURS[scores[0].kind],
        marker="o",
        capsize=3,
        label=f"{scores[0].group}, γ fixed",
    )
