"""`python -m benchmarks.step_budget`: what a target's step reads, writes, copies and waits for, beside its floor.

The real loop runs with its tensors on the `meta` device, so no GPU is needed, and only the host takes time. How to read
the tables: docs/performance.md.
"""

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import write
from benchmarks.step_budget.metered_runner import (
    CATEGORIES,
    HYBRID,
    KEYS_AND_VALUES,
    LOGITS,
    SHAPES,
    STATES,
    WEIGHTS,
    MeteredRunner,
    skipped_kernels,
)
from benchmarks.step_budget.stage import ChainStage, Load, Stage, fake_results
from benchmarks.step_budget.traffic import Traffic
from decoding.sampling.params import SamplingParams
from evaluation.metrics import table

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
_STEPS = 40  # whose median counts
_PREFILL = 2048
_BITS = {"int4": 4, "int8": 8}
_TEXT = 1024  # tokens that a row may generate


def _params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=_TEXT, **fields)  # type: ignore[arg-type]


# name, whether there are drafts, parameters
_CASES = {
    "greedy, plain": (False, _params(temperature=0)),
    "greedy, drafts": (True, _params(temperature=0)),
    "sampled, drafts": (True, _params(temperature=1)),
    "top-p, drafts": (True, _params(temperature=1, top_p=0.9)),
    "penalty, drafts": (True, _params(temperature=1, repetition_penalty=1.1)),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one kind of step costs."""

    name: str
    traffic: Traffic
    floor: Mapping[str, int]  # bytes by category: weights, keys and values, states, and logits once each
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them as JSON. Returns 1 if a number is above its budget and `--check` is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_budget", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", choices=[*SHAPES, HYBRID], default="8b")
    parser.add_argument("--quantization", choices=_BITS, help="of the target's weights")
    parser.add_argument("--drafter", choices=SHAPES, help="measure a drafter's chain, too")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--many", type=int, default=256, help="rows up to which the host's time should be linear")
    parser.add_argument("--width", type=int, default=6, help="tokens of a row with a draft")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128000)
    parser.add_argument("--case", choices=_CASES, action="append", help="may be repeated; default: all")
    parser.add_argument("--steps", type=int, default=_STEPS, help="whose median is the host's time")
    parser.add_argument("--check", action="store_true", help="fail if a number is above its budget")
    parser.add_argument("--output", type=Path, default=Path(".bench/step_budget.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # what the host computes is small
    with fake_results(), skipped_kernels():
        findings, graphs = _measure(options)
    print(as_text(findings, graphs))
    as_json = [finding.as_json() for finding in findings]
    write(options.output, "benchmarks.step_budget", vars(options), findings=as_json, graphs=graphs._asdict())
    lines = excesses(findings, graphs)
    print("\n".join(lines))
    return 1 if options.check and lines else 0


def _measure(options: argparse.Namespace) -> tuple[list[Finding], Graphs]:
    metered = _metered(options.shape, options, bits=_BITS.get(options.quantization))
    at_start = metered.capture.captured
    findings = [_find_step(metered, name, options) for name in options.case or _CASES]
    later = metered.capture.captured - at_start
    if not options.drafter:
        return findings, Graphs(at_start, later)
    drafter = _metered(options.drafter, options)
    load = Load(options.rows, options.width, options.context, _params(temperature=1))
    stage = ChainStage(drafter, load)
    drafter_at_start = drafter.capture.captured
    traffic, host_s = stage.traffic(), stage.host_s(options.steps)
    steps = options.width - 1
    floor = {category: steps * size for category, size in _floor(drafter, replace(load, width=1)).items()}
    findings.append(Finding("drafter's chain", traffic, floor, 1e3 * host_s))
    return findings, Graphs(at_start, later, drafter_at_start, drafter.capture.captured - drafter_at_start)


def _metered(shape: str, options: argparse.Namespace, *, bits: int | None = None) -> MeteredRunner:
    metered = MeteredRunner(
        shape,
        vocab_size=options.vocabulary,
        columns=options.rows * (options.context + options.width),
        slots=max(options.rows, options.many),
        max_length=options.context + _TEXT,
        max_query=_PREFILL,
        bits=bits,
    )
    gc.collect()
    gc.freeze()  # as a replica does
    return metered


def _find_step(metered: MeteredRunner, name: str, options: argparse.Namespace) -> Finding:
    drafts, params = _CASES[name]
    load = Load(options.rows, options.width if drafts else 1, options.context, params)
    with Stage(metered, load) as stage:
        traffic = stage.traffic()
        host_s, exposed_s = stage.host_s(options.steps)
    times = options.many // options.rows
    finding = Finding(name, traffic, _floor(metered, load), 1e3 * host_s, 1e3 * exposed_s)
    if times < 2:
        return finding
    with Stage(metered, replace(load, rows=times * options.rows)) as stage:
        many_s, _ = stage.host_s(options.steps // 4)
    return replace(finding, host_ms_of_many=1e3 * many_s, times=times)


def _floor(metered: MeteredRunner, load: Load) -> dict[str, int]:
    """Return the bytes of a step that reads weights, keys and states once, and touches float32 logits once."""
    return {
        WEIGHTS: metered.weight_bytes(),
        KEYS_AND_VALUES: metered.columns * metered.column_bytes(),
        STATES: load.rows * metered.state_bytes(),
        LOGITS: load.rows * load.width * metered.vocab_size * 4,
    }


if __name__ == "__main__":
    sys.exit(main())
