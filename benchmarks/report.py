"""What a benchmark found, as tables to read and as JSON to keep."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.comparison import Comparison
from benchmarks.contestant import Kind
from benchmarks.findings import REFERENCES, Score, Speculation, Times

_TITLES: dict[Kind, str] = {"hf": "× HF", "vllm": "× vLLM", "hf-assisted": "× best assisted", "plain": "× our plain"}


def as_text(comparison: Comparison) -> str:
    """The tables of one comparison."""
    title = f"{comparison.streams} stream(s), temperature {comparison.temperature:g}"
    parts = [title, _score_table(comparison.scores), _limit_table(comparison.speculations)]
    parts.append(_time_table(comparison.scores))
    parts += [f"NOT TO BE BELIEVED, S and S*: {doubt}" for doubt in comparison.doubts]
    parts += [_sweep_line(group, times) for group, times in comparison.times.items()]
    return "\n\n".join(part for part in parts if part)


def _sweep_line(group: str, times: Times) -> str:
    beside, alone = (
        ", ".join(f"{tokens}: {seconds * 1e3:.1f}" for tokens, seconds in sweep.items())
        for sweep in (times.target, times.plain)
    )
    return (
        f"{group}: a target step alone, in ms by tokens per row: {beside}; with the threads of plain decoding: {alone}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first flush left, the others flush right; nothing without rows."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, rule, *rows)
    )


def _score_table(scores: Sequence[Score]) -> str:
    present = [kind for kind in REFERENCES if kind in scores[0].ratios]
    rows = [
        [
            score.name,
            f"{score.median:.1f}",
            f"{min(score.tokens_per_s):.1f} – {max(score.tokens_per_s):.1f}",
            *(f"{score.ratios[kind]:.2f}" for kind in present),
            *_sameness_cells(score),
        ]
        for score in scores
    ]
    head = ["contestant", "tokens/s", "min – max", *(_TITLES[kind] for kind in present), "same text", "largest gap"]
    return table(head, rows)


def _sameness_cells(score: Score) -> list[str]:
    if score.sameness is None:
        return ["", ""]
    gap = f"{score.sameness.largest_gap:.2g}" if score.sameness.different else ""
    return [f"{score.sameness.share:.1%}", gap]


def _limit_table(found: Sequence[Speculation]) -> str:
    head = ["drafting", "γ", "t_1", "t_verify", "t_draft", "α", "E", "S", "S*", "achieved", "of S*"]
    head += ["acc. rate", "hit rate", "tokens/step", "step", "draft", "waited"]
    rows = [
        [
            each.name,
            str(each.limits.draft_length),
            *map(_ms, (each.limits.plain_step_s, each.limits.verify_step_s, each.limits.draft_step_s)),
            f"{each.agreement:.2f}",
            *(f"{value:.2f}" for value in (each.limits.tokens_per_step, each.alternating_limit, each.hidden_limit)),
            f"{each.speed_up:.2f}",
            f"{each.of_limit:.0%}",
            f"{each.acceptance_rate:.2f}",
            f"{each.hit_rate:.2f}",
            f"{each.acceptance_length:.2f}",
            *map(_ms, (each.verify_step_s, each.draft_step_s)),
            f"{each.waited_share:.0%}",
        ]
        for each in found
    ]
    return table(head, rows)


def _time_table(scores: Sequence[Score]) -> str:
    """Every time that a target's loop keeps, per step."""
    timed = [score for score in scores if score.activity.target.steps]
    names = (
        [each.name for each in fields(timed[0].activity.target) if each.name.endswith("_s") and each.name != "idle_s"]
        if timed
        else []
    )
    rows = [
        [score.name, *(_ms(getattr(score.activity.target, name) / score.activity.target.steps) for name in names)]
        for score in timed
    ]
    return table(["target, per step", *(name.removesuffix("_s") for name in names)], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def write(
    path: Path,
    comparisons: Sequence[Comparison],
    module: str,
    options: Mapping[str, object],
    **more: object,
) -> None:
    """Write as JSON all that the tables show, and what is needed to repeat the run.

    module: what `python -m` was given. more: other findings.
    """
    found = {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "options": options,
        "hardware": hardware(),
        "versions": _versions(),
        "commit": _commit(),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "consort"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, object]:
    """What the figures were taken on."""
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
