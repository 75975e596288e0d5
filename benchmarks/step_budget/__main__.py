"""`python -m benchmarks.step_budget`: what a target's step reads, writes, copies and waits for, beside its floor.

The real loop runs with its tensors on the `meta` device, so no GPU is needed, and only the host takes time. How to read
the tables: docs/performance.md.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.report import write
from benchmarks.step_budget.finding import Finding, Graphs, as_text, excesses
from benchmarks.step_budget.host import fake_results
from benchmarks.step_budget.metered_runner import KEYS_AND_VALUES, LOGITS, WEIGHTS, MeteredRunner, skipped_kernels
from benchmarks.step_budget.shapes import SHAPES
from benchmarks.step_budget.stage import ChainStage, Load, Stage
from decoding.sampling.params import SamplingParams

_STEPS = 40  # whose median counts
_PREFILL = 2048
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them as JSON. Returns 1 if a number is above its budget and `--check` is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_budget", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
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
    """Return findings, and the graphs that were captured."""
    metered = _metered(options.shape, options)
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


def _metered(shape: str, options: argparse.Namespace) -> MeteredRunner:
    metered = MeteredRunner(
        shape,
        vocab_size=options.vocabulary,
        columns=options.rows * (options.context + options.width),
        slots=max(options.rows, options.many),
        max_length=options.context + _TEXT,
        max_query=_PREFILL,
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
    """Return the bytes of a step that reads weights and keys once, and touches float32 logits once."""
    return {
        WEIGHTS: metered.weight_bytes(),
        KEYS_AND_VALUES: metered.columns * metered.column_bytes(),
        LOGITS: load.rows * load.width * metered.vocab_size * 4,
    }


if __name__ == "__main__":
    sys.exit(main())
