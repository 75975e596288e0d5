"""`python -m benchmarks.gpu`: the same comparison on one GPU, with the drafter on the GPU too, or on the CPU.

The bundled pair is inflated in memory to about 7 B and 0.5 B parameters, which write the same text
(training/inflate.py). Needs only torch, transformers, accelerate, msgspec and llguidance; no Ray, ZeroMQ or
command-line packages. Results are written after every workload. `--smoke` tests the program with or without a GPU.
The exit status is 1 if a greedy text differs from that of `generate` by more than a tie, or if graphs compute something
else than calls.
"""

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.comparison.gpu_checks import check_graphs
from benchmarks.comparison.run import Comparison, run_comparison
from benchmarks.comparison.tables import as_text
from benchmarks.micro.bandwidth import Floor, measure_floor
from benchmarks.micro.gpu_kernels import kernel_times
from benchmarks.peers.alternation import Alternation, AlternationContestant
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.hosts import Local
from benchmarks.peers.huggingface import HuggingFace, HuggingFaceContestant
from benchmarks.peers.in_process import running
from benchmarks.peers.ours import Ours, measure_times, swept_lengths
from benchmarks.peers.workload import Workload
from benchmarks.report import write
from engine.layers.faster_layers import use_faster_layers
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.settings import load_tokenizer
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from training.heldout import read_prompts
from training.inflate import inflate

_BESIDE, _ON_CPU = "Consort", "Consort, drafter on CPU"
_MAX_LENGTH = 512
_CHECKED = 3  # number of texts that are compared with and without graphs
_TIES = {"bfloat16": 0.5, "float32": 0.01}  # differences of logits that other batch shapes may cause


@dataclass(frozen=True, slots=True)
class Shape:
    """The size to which a checkpoint is inflated."""

    hidden: int
    layers: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Size:
    """Shapes of target and drafter, and the size of the buffer with which bandwidth is measured."""

    target: Shape
    drafter: Shape
    buffer_bytes: int


SIZES = {
    "7b": Size(Shape(4096, 32, 14336), Shape(1024, 24, 5632), 2 << 30),
    "1b": Size(Shape(2048, 24, 5632), Shape(512, 8, 1408), 1 << 30),
    "tiny": Size(Shape(320, 7, 768), Shape(256, 3, 384), 1 << 24),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and write JSON. Returns the exit status."""
    began_s = time.monotonic()
    options = _options(arguments)
    options.tie = _TIES[options.dtype] if options.tie is None else options.tie
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    kernels = list(_report_kernels(options.smoke)) if torch.cuda.is_available() else []
    if options.kernels_only:
        write(options.output, "benchmarks.gpu", vars(options), kernels=kernels, gpu=_gpu_name())
        return 0
    target, drafter = _inflated(options, "target"), _inflated(options, "drafter")
    floor = measure_floor(target, buffer_bytes=SIZES[options.size].buffer_bytes)
    print(f"target: {target.num_parameters():,} parameters, drafter: {drafter.num_parameters():,}, {options.dtype}")
    print(_floor_text(floor))
    tokenizer = load_tokenizer("models/target")
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))]
    checks = check_graphs(
        _bucketed(_shared_copy(target), _CHECKED), _bucketed(_shared_copy(drafter), _CHECKED), prompts[:_CHECKED]
    )
    print(f"replays give what calls give: {checks}", flush=True)
    comparisons: list[Comparison] = []
    workloads = [
        Workload(prompts, options.new_tokens, temperature, streams)
        for temperature, streams in itertools.product(options.temperature, options.streams)
    ]
    wrong = [] if checks.passed else ["graphs can't be recorded, or compute something else than calls"]
    for number, workload in enumerate(workloads):
        remaining_s = began_s + options.seconds - time.monotonic()
        if remaining_s < 0:
            print(f"no time for {workload.streams} stream(s), temperature {workload.temperature:g}")
            break
        until_s = time.monotonic() + remaining_s / (len(workloads) - number)
        comparisons.append(_compare(options, target, drafter, workload, until_s))
        print(f"\n{as_text(comparisons[-1])}\n\n{_share_text(comparisons[-1], floor)}\n", flush=True)
        wrong += _wrong(comparisons[-1:], options.tie)
        findings = {
            "kernels": kernels,
            "floor": asdict(floor) | {"step_s": floor.step_s},
            "graphs": asdict(checks),
            "goals": [_goals(comparison, floor) for comparison in comparisons],
            "wrong": wrong,
            "gpu": _gpu_name(),
            "seconds": time.monotonic() - began_s,
        }
        write(
            options.output,
            "benchmarks.gpu",
            vars(options),
            comparisons=[asdict(comparison) for comparison in comparisons],
            **findings,
        )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _report_kernels(smoke: bool) -> Iterator[dict[str, object]]:
    """Print and yield the times of kernels."""
    for time_ in kernel_times(smoke=smoke):
        print(time_, flush=True)
        yield asdict(time_) | {"bytes_per_s": time_.bytes_per_s}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse options. A smoke test has other defaults."""
    parser = _parser()
    if parser.parse_args(arguments).smoke:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        parser.set_defaults(device=device, size="tiny", dtype="float32", streams=[1, 2], draft_length=[2])
        parser.set_defaults(repetitions=1, prompts=1, new_tokens=12, adaptive_limit=4, threads=2)
    return parser.parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny models and few tokens, on a CPU if need be")
    parser.add_argument("--kernels-only", action="store_true", help="measure kernels beside torch's, and no model")
    parser.add_argument("--seconds", type=float, default=480, help="no further repetition begins after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--dtype", choices=_TIES, default="bfloat16", help="dtype of both models")
    parser.add_argument(
        "--cpu-drafter", choices=("bundled", "inflated"), default="bundled", help="its size; it runs in float32"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--draft-length", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--adaptive-limit", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4, help="threads on the CPU, also of a drafter there")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2, help="per repetition, at least as many as streams")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument(
        "--tie", type=float, help=f"largest difference of logits that counts as a tie; by dtype: {_TIES}"
    )
    parser.add_argument("--output", type=Path, default=Path(".bench/gpu.json"))
    return parser


def _inflated(options: argparse.Namespace, name: str) -> LlamaForCausalLM:
    """Load a bundled model and inflate it on the device."""
    spec = ModelSpec(
        name=name, path=f"models/{name}", dtype=options.dtype, device=options.device, max_length=_MAX_LENGTH
    )
    model = load_model(spec)
    assert isinstance(model, LlamaForCausalLM)
    shape: Shape = getattr(SIZES[options.size], name)
    return inflate(model, hidden=shape.hidden, layers=shape.layers, intermediate=shape.intermediate)


def _compare(
    options: argparse.Namespace,
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    workload: Workload,
    until_s: float,
) -> Comparison:
    """Run one workload with new contestants that have a slot per stream."""
    print(f"{workload.streams} stream(s), temperature {workload.temperature:g}", flush=True)
    models = Local(HuggingFace(target, drafter))
    slots, γs, most = workload.streams, options.draft_length, options.adaptive_limit
    runner, beside = _bucketed(_shared_copy(target), slots), _bucketed(_shared_copy(drafter), slots)
    drafters = {_BESIDE: lambda: beside, _ON_CPU: lambda: _cpu_runner(options, drafter, slots)}
    with running(runner, drafters, draft_lengths=γs, most=most) as ours:
        by_group = {contestant.group: contestant for contestant in ours if contestant.kind == "fixed"}
        lengths = swept_lengths(γs, most)
        return run_comparison(
            _contestants(models, Local(Alternation(runner, beside)), ours, γs),
            workload,
            models=models,
            measure=lambda: {
                group: measure_times(ours[0], drafting, streams=workload.streams, draft_lengths=lengths)
                for group, drafting in by_group.items()
            },
            repetitions=options.repetitions,
            prompts=max(options.prompts, workload.streams),
            report=print,
            until_s=until_s,
        )


def _contestants(
    models: Local[HuggingFace], alternation: Local[Alternation], ours: Sequence[Ours], γs: Sequence[int]
) -> list[Contestant]:
    return [
        HuggingFaceContestant(models),
        *(HuggingFaceContestant(models, assisted=True, draft_length=γ) for γ in (4, 8, None)),
        *(AlternationContestant(alternation, draft_length=γ) for γ in γs),
        *ours,
    ]


def _shared_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model that shares the weights. A runner replaces the attention of its model, so each needs its own."""
    shared: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _runner(model: PreTrainedModel, slots: int) -> Runner:
    """Make a runner as a server does. It changes the model in place."""
    use_faster_layers(model)
    runner = Runner(model, slots=slots, max_length=_MAX_LENGTH, max_query=256)
    runner.logits([RowInput(slot=0, start=0, tokens=[0])])
    runner.cache.clear_all()
    runner.warm_up()
    return runner


def _bucketed(model: PreTrainedModel, slots: int) -> Runner:
    """Make a runner with graphs. On a CPU they are calls of the recorded functions."""
    runner = _runner(model, slots)
    if runner.device.type == "cpu":
        runner.use_graphs(capture=lambda run: run)
    return runner


def _cpu_runner(options: argparse.Namespace, drafter: LlamaForCausalLM, slots: int) -> Runner:
    """Make a runner for a drafter on the CPU, in float32: the fastest dtype there at the bundled size."""
    torch.set_num_threads(options.threads)
    if options.cpu_drafter == "inflated":
        moved: PreTrainedModel = copy.deepcopy(drafter).cpu().float()
        return _runner(moved, slots)
    spec = ModelSpec(name="drafter", path="models/drafter", dtype="float32", device="cpu", max_length=_MAX_LENGTH)
    return _runner(load_model(spec), slots)


def _floor_text(floor: Floor) -> str:
    return (
        f"bandwidth: copy {floor.copy_bytes_per_s / 1e9:.0f} GB/s, matrix times vector "
        f"{floor.gemv_bytes_per_s / 1e9:.0f} GB/s; weights {floor.weight_bytes / 1e9:.2f} GB; "
        f"floor of a step {floor.step_s * 1e3:.2f} ms"
    )


def _goals(comparison: Comparison, floor: Floor) -> dict[str, float]:
    """Return the time of a plain step relative to the floor, and the speed-ups over `generate`."""
    plain, best = comparison.times[_BESIDE].plain[1], max(comparison.scores, key=lambda score: score.median)
    hf, ours = (next(score for score in comparison.scores if score.kind == kind).median for kind in ("hf", "plain"))
    return {
        "streams": comparison.streams,
        "temperature": comparison.temperature,
        "hf_step_s": comparison.streams / hf,
        "plain_step_s": plain,
        "floor_of_plain_step": floor.step_s / plain,
        "plain_times_hf": ours / hf,
        "best_times_hf": best.median / hf,
        "best_times_plain": best.median / ours,
    }


def _share_text(comparison: Comparison, floor: Floor) -> str:
    goals = _goals(comparison, floor)
    return (
        f"a plain step takes {goals['plain_step_s'] * 1e3:.2f} ms, of which the floor is "
        f"{goals['floor_of_plain_step']:.0%}; HF's takes {goals['hf_step_s'] * 1e3:.2f} ms; plain decoding is "
        f"{goals['plain_times_hf']:.2f} × HF, the fastest {goals['best_times_hf']:.2f} × HF"
    )


def _wrong(comparisons: Sequence[Comparison], tie: float) -> list[str]:
    """Return a line for each contestant whose text differs from that of `generate` by more than a tie."""
    return [
        f"{score.name} at {comparison.streams} stream(s), temperature {comparison.temperature:g}: {score.sameness}"
        for comparison in comparisons
        for score in comparison.scores
        if score.sameness is not None and score.sameness.largest_gap > tie
    ]


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
