"""`python -m benchmarks.gpu`: the same comparison on one GPU, the drafter beside the target or on the CPU.

The bundled pair is inflated in memory to about 7 B and 0.5 B parameters (training/inflate.py): real arithmetic, the
same text. Needs only torch, transformers, accelerate and msgspec, a small wheel without dependencies; no Ray, ZeroMQ
or command-line packages. `--device cpu --size tiny` is its smoke test. Ends with status 1 if a greedy text differs from
`generate`'s by more than a tie.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from actors.loading import ModelSpec, load_model, load_tokenizer
from actors.runner import Runner
from benchmarks.alternation import Alternation, AlternationContestant
from benchmarks.bandwidth import Floor, measure_floor
from benchmarks.comparison import Comparison, run_comparison
from benchmarks.contestant import Contestant
from benchmarks.hosts import Local
from benchmarks.huggingface import HuggingFace, HuggingFaceContestant
from benchmarks.in_process import running
from benchmarks.ours import Ours, measure_times, swept_lengths
from benchmarks.report import as_text, write
from benchmarks.workload import Workload
from training.heldout import read_prompts
from training.inflate import inflate

_BESIDE, _ON_CPU = "Consort", "Consort, drafter on CPU"
_MAX_LENGTH = 512
_TIES = {"bfloat16": 0.5, "float32": 0.01}  # differences of logits that other shapes of a batch may cause


@dataclass(frozen=True, slots=True)
class Shape:
    """What a checkpoint is inflated to."""

    hidden: int
    layers: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Size:
    """Both shapes, and the buffer with which bandwidth is measured."""

    target: Shape
    drafter: Shape
    buffer_bytes: int


SIZES = {
    "7b": Size(Shape(4096, 32, 14336), Shape(1024, 24, 5632), 2 << 30),
    "1b": Size(Shape(2048, 24, 5632), Shape(512, 8, 1408), 1 << 30),
    "tiny": Size(Shape(320, 7, 768), Shape(256, 3, 384), 1 << 24),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and write JSON; the exit status."""
    options = _parser().parse_args(arguments)
    options.tie = _TIES[options.dtype] if options.tie is None else options.tie
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    target, drafter = _inflated(options, "target"), _inflated(options, "drafter")
    floor = measure_floor(target, buffer_bytes=SIZES[options.size].buffer_bytes)
    print(f"target: {target.num_parameters():,} parameters, drafter: {drafter.num_parameters():,}, {options.dtype}")
    print(_floor_text(floor))
    tokenizer = load_tokenizer("models/target")
    prompts = [tokenizer(text)["input_ids"] for text in read_prompts(Path("models/heldout.jsonl"))]
    comparisons = []
    for streams, temperature in itertools.product(options.streams, options.temperature):
        workload = Workload(prompts, options.new_tokens, temperature, streams)
        comparisons.append(_compare(options, target, drafter, workload))
        print(f"\n{as_text(comparisons[-1])}\n\n{_share_text(comparisons[-1], floor)}\n", flush=True)
    wrong = _wrong(comparisons, options.tie)
    found = asdict(floor) | {"step_s": floor.step_s}
    write(options.output, comparisons, "benchmarks.gpu", vars(options), floor=found, wrong=wrong, gpu=_gpu_name())
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--dtype", choices=_TIES, default="bfloat16", help="of both models")
    parser.add_argument("--cpu-drafter", choices=("bundled", "inflated"), default="bundled", help="in float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--draft-length", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--adaptive-limit", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4, help="of the CPU, and so of a drafter there")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2, help="per repetition, but at least as many as streams")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--tie", type=float, help=f"what counts as a tie of logits; by dtype: {_TIES}")
    parser.add_argument("--output", type=Path, default=Path(".bench/gpu.json"))
    return parser


def _inflated(options: argparse.Namespace, name: str) -> LlamaForCausalLM:
    """A bundled model, grown on the device itself."""
    spec = ModelSpec(
        name=name, path=f"models/{name}", dtype=options.dtype, device=options.device, max_length=_MAX_LENGTH
    )
    model = load_model(spec)
    assert isinstance(model, LlamaForCausalLM)
    shape: Shape = getattr(SIZES[options.size], name)
    return inflate(model, hidden=shape.hidden, layers=shape.layers, intermediate=shape.intermediate)


def _compare(
    options: argparse.Namespace, target: LlamaForCausalLM, drafter: LlamaForCausalLM, workload: Workload
) -> Comparison:
    """All contestants anew, with as many slots as there are streams."""
    print(f"{workload.streams} stream(s), temperature {workload.temperature:g}", flush=True)
    models = Local(HuggingFace(target, drafter))
    slots, γs, most = workload.streams, options.draft_length, options.adaptive_limit
    runner, beside = _runner(_twin(target), slots), _runner(_twin(drafter), slots)
    drafters = {_BESIDE: lambda: beside, _ON_CPU: lambda: _runner(_cpu_drafter(options, drafter), slots)}
    with running(runner, drafters, draft_lengths=γs, most=most) as ours:
        by_group = {each.group: each for each in ours if each.kind == "fixed"}
        lengths = swept_lengths(γs, most)
        return run_comparison(
            _contestants(models, Local(Alternation(runner, beside)), ours, γs),
            workload,
            models=models,
            measure=lambda: {
                group: measure_times(ours[0], each, streams=workload.streams, draft_lengths=lengths)
                for group, each in by_group.items()
            },
            repetitions=options.repetitions,
            prompts=max(options.prompts, workload.streams),
            report=print,
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


def _twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights, not copied, in a model of its own: a runner changes how its model attends."""
    shared: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _runner(model: PreTrainedModel, slots: int) -> Runner:
    return Runner(model, slots=slots, max_length=_MAX_LENGTH, max_query=256)


def _cpu_drafter(options: argparse.Namespace, drafter: LlamaForCausalLM) -> PreTrainedModel:
    """In float32, which CPUs compute fastest at the bundled size."""
    torch.set_num_threads(options.threads)
    if options.cpu_drafter == "inflated":
        moved: PreTrainedModel = copy.deepcopy(drafter).cpu().float()
        return moved
    spec = ModelSpec(name="drafter", path="models/drafter", dtype="float32", device="cpu", max_length=_MAX_LENGTH)
    return load_model(spec)


def _floor_text(floor: Floor) -> str:
    return (
        f"bandwidth: copy {floor.copy_bytes_per_s / 1e9:.0f} GB/s, matrix times vector "
        f"{floor.gemv_bytes_per_s / 1e9:.0f} GB/s; weights {floor.weight_bytes / 1e9:.2f} GB; "
        f"floor of a step {floor.step_s * 1e3:.2f} ms"
    )


def _share_text(comparison: Comparison, floor: Floor) -> str:
    """How close the steps of plain decoding come to the floor."""
    hf = next(each for each in comparison.scores if each.kind == "hf")
    steps = {"HF": comparison.streams / hf.median, "Consort": comparison.times[_BESIDE].plain[1]}
    return "; ".join(
        f"{name}: {step_s * 1e3:.2f} ms a plain step, of which the floor is {floor.step_s / step_s:.0%}"
        for name, step_s in steps.items()
    )


def _wrong(comparisons: Sequence[Comparison], tie: float) -> list[str]:
    """What wrote another text than `generate` where that was no tie."""
    return [
        f"{each.name} at {comparison.streams} stream(s), temperature {comparison.temperature:g}: {each.sameness}"
        for comparison in comparisons
        for each in comparison.scores
        if each.sameness is not None and each.sameness.largest_gap > tie
    ]


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
