"""Tokens per second against draft length, as a picture. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.comparison import Comparison
from benchmarks.comparison.findings import Score
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
    "inside": "#9467bd",
}
_PLAIN: tuple[Kind, ...] = ("hf", "vllm", "plain")  # drawn as whole lines: they have no draft length
_APART = 0.06  # in tokens


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """One panel per comparison, in a row per temperature and a column per number of streams."""
    temperatures = sorted({comparison.temperature for comparison in comparisons})
    streams = sorted({comparison.streams for comparison in comparisons})
    figure = Figure(figsize=(6.4 * len(streams), 5.6 * len(temperatures)), layout="constrained")
    panels = figure.subplots(len(temperatures), len(streams), squeeze=False)
    for comparison in comparisons:
        _panel(panels[temperatures.index(comparison.temperature)][streams.index(comparison.streams)], comparison)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, comparison: Comparison) -> None:
    for one in comparison.scores:
        if one.draft_length is None:
            style = "-" if one.kind in _PLAIN else "--"
            axes.axhline(one.median, color=_COLOURS[one.kind], linestyle=style, label=one.name)
    for place, group in enumerate(dict.fromkeys(one.group for one in comparison.scores)):
        _curve(
            axes,
            place * _APART,
            [one for one in comparison.scores if one.group == group and one.draft_length is not None],
        )
    axes.set_title(f"{comparison.streams} stream(s), temperature {comparison.temperature:g}")
    axes.set_xlabel("draft length γ")
    axes.set_ylabel("tokens/s, median (bars: least and most)")
    lengths = {one.draft_length for one in comparison.scores if one.draft_length is not None}
    axes.set_xticks(sorted(lengths))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _curve(axes: Axes, shift: float, scores: Sequence[Score]) -> None:
    """Medians over γ, with the spread as bars. shift: to the right, so that bars of several curves stay apart."""
    if not scores:
        return
    scores = sorted(scores, key=lambda one: one.draft_length or 0)
    medians = [one.median for one in scores]
    below = [one.median - min(one.tokens_per_s) for one in scores]
    above = [max(one.tokens_per_s) - one.median for one in scores]
    axes.errorbar(
        [(one.draft_length or 0) + shift for one in scores],
        medians,
        yerr=[below, above],
        color=_COLOURS[scores[0].kind],
        marker="o",
        capsize=3,
        label=f"{scores[0].group}, γ fixed",
    )
