"""`python -m benchmarks.gpu kernels|steps`: Triton kernels beside torch's operators; steps of a Llama of usual size.

Needs only torch, transformers, accelerate, msgspec and llguidance. See `python -m benchmarks --gpu 7b` for peers.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.kernels import kernel_times
from benchmarks.gpu.steps import report_steps
from benchmarks.report import write
from benchmarks.step_budget.metered_runner import SHAPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a token's logits depend on what else is in the step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("kernels", help="kernels beside torch's")
    part.set_defaults(run=_report_kernels)
    part.add_argument("--output", type=Path, default=Path(".bench/gpu-kernels.json"))
    part = parts.add_parser("steps", help="times of steps, and whether logits have the same bits in any company")
    part.set_defaults(run=report_steps)
    part.add_argument("--shape", choices=SHAPES, default="8b")
    part.add_argument("--vocabulary", type=int, default=128256)
    part.add_argument("--rows", type=int, default=64)
    part.add_argument("--context", type=int, default=2048)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _report_kernels(options: argparse.Namespace) -> int:
    times = []
    for each in kernel_times():
        print(each, flush=True)
        times.append(asdict(each) | {"bytes_per_s": each.bytes_per_s})
    write(options.output, "benchmarks.gpu", {}, kernels=times, gpu=torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
