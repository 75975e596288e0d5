"""Findings about a step, and how they compare with their floor and with the budget in `budget.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import table
from benchmarks.step_budget.metered_runner import CATEGORIES
from benchmarks.step_budget.traffic import Traffic

_BUDGET = Path(__file__).with_name("budget.json")
_BYTES_PER_S = 3.35e12  # of an H100's memory


@dataclass(frozen=True, slots=True)
class Finding:
    """What one kind of step costs."""

    name: str
    traffic: Traffic
    floor: Mapping[str, int]  # bytes by category: weights, keys and values, and logits once each
    host_ms: float
    exposed_ms: float | None = None  # of `host_ms`: while the device has nothing to do
    host_ms_of_many: float | None = None  # with `times` as many rows
    times: int = 1

    @property
    def bytes_of_floor(self) -> float:
        return self.traffic.bytes / sum(self.floor.values())

    @property
    def host_of_linear(self) -> float | None:
        """The host's time with many rows, relative to what the time with few predicts."""
        return None if self.host_ms_of_many is None else self.host_ms_of_many / (self.times * self.host_ms)

    def as_json(self) -> dict[str, object]:
        traffic = self.traffic
        return {
            "name": self.name,
            "bytes": {
                category: {
                    "read": traffic.read[category],
                    "written": traffic.written[category],
                    "floor": self.floor.get(category, 0),
                }
                for category in CATEGORIES
            },
            "bytes_of_floor": self.bytes_of_floor,
            "kernels": traffic.kernels,
            "copies_to_device": traffic.to_device,
            "bytes_to_device": traffic.to_device_bytes,
            "copies_to_host": traffic.to_host,
            "bytes_to_host": traffic.to_host_bytes,
            "waits": traffic.waits,
            "host_ms": self.host_ms,
            "exposed_ms": self.exposed_ms,
            "host_ms_of_many": self.host_ms_of_many,
            "host_of_linear": self.host_of_linear,
        }


class Graphs(NamedTuple):
    """How many graphs were captured, at the start and later, when requests wait for that."""

    at_start: int
    later: int
    drafter_at_start: int = 0
    drafter_later: int = 0


def as_text(findings: list[Finding], graphs: Graphs) -> str:
    """Return two tables, bytes beside their floor and the rest, and a line about graphs."""
    head = ["GB", *CATEGORIES, "all", "floor", "ratio", "ms at 3.35 TB/s", "floor"]
    rows = []
    for finding in findings:
        traffic, floor = finding.traffic, sum(finding.floor.values())
        parts = [traffic.read[category] + traffic.written[category] for category in CATEGORIES]
        rows.append(
            [
                finding.name,
                *(f"{part / 1e9:.2f}" for part in (*parts, traffic.bytes, floor)),
                f"{finding.bytes_of_floor:.2f}",
                *(f"{size / _BYTES_PER_S * 1e3:.1f}" for size in (traffic.bytes, floor)),
            ]
        )
    other_head = [
        "a step",
        "kernels",
        "to device",
        "to host",
        "waits",
        "host ms",
        "exposed",
        "host ms of many",
        "of linear",
    ]
    other_rows = [
        [
            finding.name,
            *(str(getattr(finding.traffic, name)) for name in ("kernels", "to_device", "to_host", "waits")),
            f"{finding.host_ms:.2f}",
            *(
                "" if number is None else f"{number:.2f}"
                for number in (finding.exposed_ms, finding.host_ms_of_many, finding.host_of_linear)
            ),
        ]
        for finding in findings
    ]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in graphs._asdict().items())
    return f"{table(head, rows)}\n\n{table(other_head, other_rows)}\n\ngraphs: {counts}"


def excesses(findings: list[Finding], graphs: Graphs) -> list[str]:
    """Return a line for each number above its budget."""
    budget: dict[str, Any] = json.loads(_BUDGET.read_text(encoding="utf-8"))
    lines = []

    def check(what: str, value: float | None, limit: float | None) -> None:
        if value is not None and limit is not None and value > limit:
            lines.append(f"{what}: {value:.4g}, but the budget is {limit:.4g}")

    for finding in findings:
        numbers = finding.as_json()
        for name in ("bytes_of_floor", "host_ms", "host_of_linear", "copies_to_host", "copies_to_device", "waits"):
            value = numbers[name]
            assert value is None or isinstance(value, int | float)
            limit = budget[name]
            check(f"{finding.name}: {name}", value, limit.get(finding.name) if isinstance(limit, dict) else limit)
    check("graphs", sum(graphs), budget["graphs"])
    check("graphs captured after the start", graphs.later + graphs.drafter_later, budget["graphs_after_start"])
    return lines
