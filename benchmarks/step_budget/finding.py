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
_COLUMNS = {  # of the second table
    "kernels": "kernels",
    "copies_to_device": "to device",
    "copies_to_host": "to host",
    "waits": "waits",
    "host_ms": "host ms",
    "exposed_ms": "exposed",
    "host_ms_of_many": "host ms of many",
    "host_of_linear": "of linear",
}


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

    def numbers(self) -> dict[str, float | None]:
        """Return what is printed and checked. `host_of_linear`: with many rows, beside what few rows predict."""
        traffic, many_ms = self.traffic, self.host_ms_of_many
        return {
            "bytes_of_floor": traffic.bytes / sum(self.floor.values()),
            "kernels": traffic.kernels,
            "copies_to_device": traffic.to_device,
            "bytes_to_device": traffic.to_device_bytes,
            "copies_to_host": traffic.to_host,
            "bytes_to_host": traffic.to_host_bytes,
            "waits": traffic.waits,
            "host_ms": self.host_ms,
            "exposed_ms": self.exposed_ms,
            "host_ms_of_many": many_ms,
            "host_of_linear": None if many_ms is None else many_ms / (self.times * self.host_ms),
        }

    def as_json(self) -> dict[str, object]:
        read, written = self.traffic.read, self.traffic.written
        sizes = {
            name: {"read": read[name], "written": written[name], "floor": self.floor.get(name, 0)}
            for name in CATEGORIES
        }
        return {"name": self.name, "bytes": sizes, **self.numbers()}


class Graphs(NamedTuple):
    """How many graphs were captured, at the start and later, when requests wait for that."""

    at_start: int
    later: int
    drafter_at_start: int = 0
    drafter_later: int = 0


def as_text(findings: list[Finding], graphs: Graphs) -> str:
    """Return two tables, bytes beside their floor and the rest, and a line about graphs."""
    rows, other_rows = [], []
    for finding in findings:
        traffic, floor, numbers = finding.traffic, sum(finding.floor.values()), finding.numbers()
        sizes = [*(traffic.read[name] + traffic.written[name] for name in CATEGORIES), traffic.bytes, floor]
        least_ms = (f"{size / _BYTES_PER_S * 1e3:.1f}" for size in (traffic.bytes, floor))
        gigabytes = (f"{size / 1e9:.2f}" for size in sizes)
        rows.append([finding.name, *gigabytes, f"{numbers['bytes_of_floor']:.2f}", *least_ms])
        chosen = (numbers[name] for name in _COLUMNS)
        other_rows.append(
            [finding.name, *("" if n is None else str(n) if isinstance(n, int) else f"{n:.2f}" for n in chosen)]
        )
    head = ["GB", *CATEGORIES, "all", "floor", "ratio", "ms at 3.35 TB/s", "floor"]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in graphs._asdict().items())
    return f"{table(head, rows)}\n\n{table(['a step', *_COLUMNS.values()], other_rows)}\n\ngraphs: {counts}"


def excesses(findings: list[Finding], graphs: Graphs) -> list[str]:
    """Return a line for each number above its budget."""
    budget: dict[str, Any] = json.loads(_BUDGET.read_text(encoding="utf-8"))
    numbers: dict[str, tuple[float | None, float | None]] = {
        "graphs": (sum(graphs), budget["graphs"]),
        "graphs captured after the start": (graphs.later + graphs.drafter_later, budget["graphs_after_start"]),
    }
    for finding in findings:
        for name, value in finding.numbers().items():
            limit = budget.get(name)
            numbers[f"{finding.name}: {name}"] = (value, limit.get(finding.name) if isinstance(limit, dict) else limit)
    return [
        f"{what}: {value:.4g}, but the budget is {limit:.4g}"
        for what, (value, limit) in numbers.items()
        if value is not None and limit is not None and value > limit
    ]
