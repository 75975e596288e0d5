"""What a benchmark found, as a table to read and as JSON to keep."""

import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.limits import Limits


@dataclass(frozen=True, slots=True)
class Score:
    """One contestant's tokens per second in every repetition."""

    name: str
    tokens_per_s: Sequence[float]
    same_text: float  # share of the tokens before the first difference from plain `generate`, at temperature 0

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How far our speculative decoding came, against our plain decoding in the same run."""

    limits: Limits
    speed_up: float  # achieved
    acceptance_rate: float  # α: accepted / drafted
    acceptance_length: float  # tokens committed per target step
    waited_share: float  # of the target's time with a request in hand: waiting for drafts

    @property
    def of_limit(self) -> float:
        return self.speed_up / self.limits.hidden


def print_report(scores: Sequence[Score], speculations: Sequence[Speculation]) -> None:
    """The tables."""
    console = Console()
    table = Table("contestant", "tokens/s", "min – max", "× HF generate", "same text")
    for score in scores:
        spread = f"{min(score.tokens_per_s):.1f} – {max(score.tokens_per_s):.1f}"
        ratio = f"{score.median / scores[0].median:.2f}"
        table.add_row(score.name, f"{score.median:.1f}", spread, ratio, f"{score.same_text:.0%}")
    console.print(table)
    limits = Table("γ", "t_1", "t_verify", "t_draft", "α", "tokens/step", "E", "S*", "achieved", "of S*", "waited")
    for found in speculations:
        limit = found.limits
        times = (limit.plain_step_s, limit.verify_step_s, limit.draft_step_s)
        limits.add_row(
            str(limit.draft_length),
            *(f"{seconds * 1e3:.1f} ms" for seconds in times),
            f"{found.acceptance_rate:.2f}",
            f"{found.acceptance_length:.2f}",
            f"{limit.tokens_per_step:.2f}",
            f"{limit.hidden:.2f}",
            f"{found.speed_up:.2f}",
            f"{found.of_limit:.0%}",
            f"{found.waited_share:.0%}",
        )
    console.print(limits)


def as_json(
    scores: Sequence[Score], speculations: Sequence[Speculation], options: dict[str, object]
) -> dict[str, object]:
    """Everything that the tables show, and what is needed to repeat the run."""
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "options": options,
        "hardware": _hardware(),
        "versions": {name: version(name) for name in ("torch", "transformers", "consort")},
        "commit": _commit(),
        "scores": [asdict(score) | {"median": score.median} for score in scores],
        "speculation": [
            asdict(found)
            | {"hidden_limit": found.limits.hidden, "alternating_limit": found.limits.alternating}
            | {"of_limit": found.of_limit}
            for found in speculations
        ],
    }


def _hardware() -> dict[str, object]:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": len(names), "system": platform.platform()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
