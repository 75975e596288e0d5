"""The page of `consort report`: Markdown, two pictures and JSON. Measures nothing."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cli.commands.report import Report
from evaluation.table import metrics_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES, _ACCEPTANCE = "execution-time.png", "acceptance.png"
_BLUE, _RED = "#3b6fb6", "#c0392b"


def write_page(report: Report, folder: Path) -> list[Path]:
    """Write the report into a folder, which is made if it is missing. Returns the files.

    Without matplotlib it has no pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.md", folder / "report.json"
    pictures = [folder / _TIMES, folder / _ACCEPTANCE] if len(report.seconds) > 1 and has_pictures() else []
    page.write_text(_page(report, pictured=bool(pictures)), encoding="utf-8")
    data.write_text(json.dumps(report.document(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if pictures:
        _draw_times(report, pictures[0])
        _draw_acceptance(report.acceptance, pictures[1])
    return [page, data, *pictures]


def has_pictures() -> bool:
    """Whether matplotlib is here, which draws them."""
    return find_spec("matplotlib") is not None


def _page(report: Report, *, pictured: bool) -> str:
    more = {way.way.name: (f"{way.tokens_per_s:.1f}",) for way in report.ways}
    table = metrics_table({way.way.name: way.metrics for way in report.ways}, more, ("tokens/s",))
    parts = [
        f"# Report on {report.endpoint}",
        f"{len(report.prompts)} prompts, up to {report.max_tokens} tokens each, temperature {report.temperature:g}, "
        f"one request at a time, at {report.server}.",
        "## Texts and speed",
        f"```text\n{table}\n```",
        "Entropies in bits, likelihood in nats per token by the target alone; means over the prompts.",
    ]
    if len(report.seconds) > 1:
        plain = report.seconds[0]
        best = min((length for length in report.seconds if length), key=lambda length: report.seconds[length])
        parts += [
            "## Execution time by draft length",
            *([f"![Seconds by draft length, and plain]({_TIMES})"] if pictured else []),
            f"Plain decoding took {plain:.2f} s. The fastest draft length was {best}, with {report.seconds[best]:.2f} "
            f"s: {plain / report.seconds[best]:.2f} times as fast.",
        ]
        if pictured:
            parts += ["## Acceptance by position", f"![Share of drafts accepted up to each position]({_ACCEPTANCE})"]
    parts.append("## Texts")
    for index, prompt in enumerate(report.prompts):
        parts.append(f"### {prompt}")
        parts += [f"**{way.way.name}**:\n\n```text\n{way.texts[index].strip()}\n```" for way in report.ways]
    return "\n\n".join(parts) + "\n"


def _draw_times(report: Report, path: Path) -> None:
    figure = _new_figure()
    axes = figure.subplots()
    lengths = [length for length in sorted(report.seconds) if length]
    axes.bar(lengths, [report.seconds[length] for length in lengths], color=_BLUE, label="speculative")
    axes.axhline(report.seconds[0], color=_RED, linestyle="--", label="plain")
    axes.set(xlabel="draft length", ylabel="seconds", xticks=lengths)
    axes.legend()
    figure.savefig(path, dpi=150)


def _draw_acceptance(shares: Sequence[float], path: Path) -> None:
    figure = _new_figure()
    axes = figure.subplots()
    positions = range(1, len(shares) + 1)
    axes.bar(positions, shares, color=_BLUE)
    axes.set(xlabel="position in the draft", ylabel="share of drafts accepted up to there", ylim=(0, 1))
    axes.set_xticks(list(positions))
    figure.savefig(path, dpi=150)


def _new_figure() -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(7, 4), layout="constrained")
