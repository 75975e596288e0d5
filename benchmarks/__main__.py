"""Consort, plain and speculative, beside Hugging Face `generate`, vLLM and alternation, in one interleaved run.

All have the same checkpoints, dtype, prompts, output length and cores. See docs/benchmarks.md. With `--gpu`, all run in
this process on one GPU, the bundled pair is inflated in memory, and vLLM and Ray's packages are not needed.
"""

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.findings import Comparison, as_text, run_comparison
from benchmarks.models import held_out_tokens, inflated
from benchmarks.peers import huggingface
from benchmarks.peers.consort import (
    Consort,
    in_processes,
    in_threads,
    measure_times,
    start_processes,
    swept_lengths,
)
from benchmarks.peers.contestant import Contestant, Kind, Workload
from benchmarks.peers.huggingface import HuggingFace, HuggingFaceContestant
from benchmarks.processes import Child, Host, Local
from benchmarks.report import write
from benchmarks.tiny.inflate import inflate
from engine.layers.faster_layers import use_faster_layers
from engine.loading.checkpoint import ModelSpec, load_model
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

# With --gpu: hidden size, layers and intermediate size of target and drafter.
_SIZES = {
    "7b": {"target": (4096, 32, 14336), "drafter": (1024, 24, 5632)},
    "tiny": {"target": (320, 7, 768), "drafter": (256, 3, 384)},
}
_TIES = {"bfloat16": 0.5, "float32": 0.01}  # differences of logits that other batch shapes may cause
_MAX_LENGTH = 512
_COLOURS: dict[Kind, str] = {
    "hf": "#7f7f7f",
    "hf-assisted": "#bcbd22",
    "vllm": "#2ca02c",
    "alternation": "#ff7f0e",
    "plain": "#1f77b4",
    "fixed": "#d62728",
    "adaptive": "#d62728",
    "colocated": "#9467bd",
}


@dataclass(frozen=True, slots=True)
class _Lineup:
    """All contestants, paused, and the models that judge their texts."""

    contestants: Sequence[Contestant]
    models: Host[HuggingFace]
    ours: Sequence[Consort]  # the plain one first
    left_out: Sequence[str] = ()  # with the reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write JSON, and draw. Returns 1 if a greedy text differs from `generate`'s by more than a tie."""
    options = _options(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    until_s = time.monotonic() + options.seconds
    with (_in_process if options.gpu else _in_processes)(options) as lineup:
        print(*lineup.left_out, sep="\n")
        prompts = held_out_tokens(options.target)
        comparisons: list[Comparison] = []
        for streams, temperature in itertools.product(options.streams, options.temperature):
            if time.monotonic() < until_s:
                workload = Workload(prompts, options.new_tokens, temperature, streams)
                comparisons.append(_compare(lineup, options, workload, until_s))
                findings = list(map(asdict, comparisons))
                write(options.output, "benchmarks", vars(options), comparisons=findings, left_out=lineup.left_out)
    if not options.gpu:
        _draw(comparisons, options.temperature, options.output.with_suffix(".png"))
    wrong = [
        f"{score.name}, {comparison.title}: {score.sameness}"
        for comparison in comparisons
        for score in comparison.scores
        if score.sameness is not None and score.sameness.largest_gap > _TIES.get(options.dtype, 0.5)
    ]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    parser.add_argument("--target", type=Path, help="default: the bundled target, inflated to about 300 M parameters")
    parser.add_argument("--drafter", type=Path, default=Path("models/drafter"))
    parser.add_argument(
        "--gpu", choices=_SIZES, help="run on one GPU, inflated to this size; tiny: on a CPU if need be"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the target, for every contestant")
    parser.add_argument("--drafter-dtype", default="float32", help="of a drafter on the CPU, for every contestant")
    parser.add_argument("--streams", type=int, **several, help="concurrent prompts (1 8)")
    parser.add_argument("--temperature", type=float, **several, help="(0)")
    parser.add_argument("--draft-length", type=int, **several, help="γ (2 4 8)")
    parser.add_argument("--adaptive-limit", type=int, default=8, help="maximum of an adaptive γ")
    parser.add_argument("--threads", type=int, default=4, help="of a contestant that runs one model at a time")
    parser.add_argument("--target-threads", type=int, default=3, help="of our target while a drafter runs beside it")
    parser.add_argument("--drafter-threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=2, help="new ones per repetition, at least as many as streams")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1e6, help="no further repetition begins after this time")
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(".bench/vllm/bin/python"), help="by `make bench-peers`"
    )
    parser.add_argument("--output", type=Path, default=Path(".bench/bench.json"), help="the figure goes beside it")
    options = parser.parse_args(arguments)
    for name, default in {"streams": [1, 8], "temperature": [0.0], "draft_length": [2, 4, 8]}.items():
        setattr(options, name, getattr(options, name) or default)
    options.target = options.target or (Path("models/target") if options.gpu else inflated())
    return options


def _compare(lineup: _Lineup, options: argparse.Namespace, workload: Workload, until_s: float) -> Comparison:
    print(f"{workload.streams} stream(s), temperature {workload.temperature:g}", flush=True)
    γs, plain = swept_lengths(options.draft_length, options.adaptive_limit), lineup.ours[0]
    drafting = {contestant.group: contestant for contestant in lineup.ours if contestant.kind == "fixed"}
    comparison = run_comparison(
        lineup.contestants,
        workload,
        models=lineup.models,
        measure=lambda: {
            group: measure_times(plain, contestant, streams=workload.streams, draft_lengths=γs)
            for group, contestant in drafting.items()
        },
        repetitions=options.repetitions,
        prompts=max(options.prompts, workload.streams),
        report=partial(print, flush=True),
        until_s=until_s,
    )
    print(f"\n{as_text(comparison)}\n", flush=True)
    return comparison


def _hugging_face(models: Host[HuggingFace]) -> list[Contestant]:
    assisted = (
        HuggingFaceContestant(models, assisted=True, draft_length=γ) for γ in (4, 8, None)
    )  # None: its defaults
    return [HuggingFaceContestant(models), *assisted]


@contextmanager
def _in_processes(options: argparse.Namespace) -> Iterator[_Lineup]:
    """Start all processes, load them one after the other, and pause them. They end with the `with` block."""
    from benchmarks.peers.vllm import Vllm

    slots, threads = max(options.streams), options.threads
    target = ModelSpec(name="target", path=str(options.target), dtype=options.dtype, device="cpu", slots=slots)
    target = replace(target, threads=threads)
    drafter = replace(target, name="drafter", path=str(options.drafter), dtype=options.drafter_dtype)
    hf = Child(partial(huggingface.load, target, drafter), threads=threads)
    apart = replace(target, threads=options.target_threads), replace(drafter, threads=options.drafter_threads)
    replicas = start_processes(target, *apart)  # all processes are importing from here on
    with ExitStack() as stack:
        vllm, left_out = [], []
        if options.vllm_python.exists():
            print("vLLM loads and compiles …", flush=True)
            engine = Vllm(options.vllm_python, target, threads=threads, log=Path(".bench/vllm.log"))
            vllm.append(stack.enter_context(engine))
        else:
            left_out.append(f"vLLM is left out: there is no {options.vllm_python} (`make bench-peers` makes it)")
        print("the others load …", flush=True)
        stack.enter_context(hf).pause()
        lengths = {"draft_lengths": options.draft_length, "most": options.adaptive_limit}
        ours = stack.enter_context(in_processes(replicas, **lengths))
        yield _Lineup([*_hugging_face(hf), *vllm, *ours], hf, ours, left_out)


@contextmanager
def _in_process(options: argparse.Namespace) -> Iterator[_Lineup]:
    """Load all models here. The drafter runs beside the target on the GPU and, as a second group, on the CPU."""
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, drafter = (_inflated(options, name, device) for name in ("target", "drafter"))
    models, slots = Local(HuggingFace(target, drafter)), max(options.streams)
    runner, beside = _runner(_shared_copy(target), slots), _runner(_shared_copy(drafter), slots)
    on_cpu = ModelSpec(name="drafter", path=str(options.drafter), dtype=options.drafter_dtype, device="cpu")
    drafters = {"Consort": lambda: beside, "Consort, drafter on CPU": lambda: _runner(load_model(on_cpu), slots)}
    with in_threads(runner, drafters, draft_lengths=options.draft_length, most=options.adaptive_limit) as ours:
        yield _Lineup([*_hugging_face(models), *ours], models, ours)


def _inflated(options: argparse.Namespace, name: str, device: str) -> LlamaForCausalLM:
    spec = ModelSpec(name=name, path=str(getattr(options, name)), dtype=options.dtype, device=device)
    model = load_model(replace(spec, max_length=_MAX_LENGTH))
    assert isinstance(model, LlamaForCausalLM)
    hidden, layers, intermediate = _SIZES[options.gpu][name]
    return inflate(model, hidden=hidden, layers=layers, intermediate=intermediate)


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


def _draw(comparisons: Sequence[Comparison], temperatures: Sequence[float], path: Path) -> None:
    """Draw contestants with a constant γ as curves over γ, others as lines: a row of panels for each temperature."""
    from benchmarks.report import Curve, Panel, draw

    def panel(comparison: Comparison) -> Panel:
        scores = comparison.scores
        curves = []
        for each in scores:
            if each.draft_length is None:
                style = "-" if each.kind in ("hf", "vllm", "plain") else "--"
                curves.append(Curve(each.name, [], [each.median], colour=_COLOURS[each.kind], style=style))
        for group in dict.fromkeys(each.group for each in scores if each.draft_length is not None):
            fixed = [each for each in scores if each.group == group and each.draft_length is not None]
            ranges = [(min(each.tokens_per_s), max(each.tokens_per_s)) for each in fixed]
            γs, medians = [each.draft_length or 0 for each in fixed], [each.median for each in fixed]
            curves.append(Curve(f"{group}, γ fixed", γs, medians, ranges, _COLOURS[fixed[0].kind]))
        return Panel(f"tokens/s, {comparison.title}", "draft length γ", curves)

    draw([[panel(each) for each in comparisons if each.temperature == t] for t in temperatures], path)


if __name__ == "__main__":
    sys.exit(main())
