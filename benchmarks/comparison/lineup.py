"""The contestants on a CPU, each in its own processes, and their start, one after the other."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers.utils import logging

from actors.replica.replica import load_runner
from benchmarks.peers import huggingface
from benchmarks.peers.alternation import Alternation, AlternationContestant
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.hosts import Child, Host
from benchmarks.peers.huggingface import HuggingFace, HuggingFaceContestant
from benchmarks.peers.ours import Ours
from benchmarks.peers.processes import Consort, Models
from benchmarks.peers.vllm import Vllm, VllmContestant
from engine.loading.checkpoint import ModelSpec

_HF_DRAFT_LENGTHS = (4, 8, None)  # None: the defaults of `generate`


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the contestants, as on the command line."""

    target: Path
    drafter: Path
    dtype: str
    drafter_dtype: str
    streams: Sequence[int]
    draft_lengths: Sequence[int]
    adaptive_limit: int
    threads: int
    target_threads: int
    drafter_threads: int
    vllm_python: Path

    @property
    def models(self) -> Models:
        slots = max(self.streams)
        return Models(
            ModelSpec(name="target", path=str(self.target), dtype=self.dtype, device="cpu", slots=slots),
            ModelSpec(name="drafter", path=str(self.drafter), dtype=self.drafter_dtype, device="cpu", slots=slots),
            threads=self.threads,
            target_threads=self.target_threads,
            drafter_threads=self.drafter_threads,
        )


@dataclass(frozen=True, slots=True)
class Lineup:
    """All contestants, paused, and those with a special part in the comparison."""

    contestants: Sequence[Contestant]
    models: Host[HuggingFace]
    plain: Ours
    drafting: Ours
    left_out: Sequence[str]  # contestants that do not take part, with the reason


@contextlib.contextmanager
def start_lineup(options: Options, *, report: Callable[[str], None]) -> Iterator[Lineup]:
    """Start all processes, load them one after the other, and pause them. They end with the `with` block."""
    models, γs = options.models, options.draft_lengths
    hf = Child(partial(huggingface.load, *_specs(models)), threads=models.threads)
    alternation = Child(partial(_load_alternation, models), threads=models.threads)
    consort = Consort(models)  # all processes are importing from here on
    with contextlib.ExitStack() as stack:
        peers: list[Contestant] = []
        left_out = []
        if options.vllm_python.exists():
            report("vLLM loads and compiles …")
            engine = Vllm(options.vllm_python, models.target, threads=models.threads, log=Path(".bench/vllm.log"))
            peers.append(VllmContestant(stack.enter_context(engine)))
            engine.pause()
        else:
            left_out.append(f"vLLM is left out: there is no {options.vllm_python} (`make bench-peers` makes it)")
            report(left_out[0])
        report("the others load …")
        for child in (hf, alternation):
            stack.enter_context(child)
            child.pause()
        plain, *drafting = stack.enter_context(consort.running(γs, options.adaptive_limit))
        contestants = [
            HuggingFaceContestant(hf),
            *(HuggingFaceContestant(hf, assisted=True, draft_length=γ) for γ in _HF_DRAFT_LENGTHS),
            *peers,
            *(AlternationContestant(alternation, draft_length=γ) for γ in γs),
            plain,
            *drafting,
        ]
        yield Lineup(contestants, hf, plain, drafting[0], left_out)


def _specs(models: Models) -> tuple[ModelSpec, ModelSpec]:
    """Return the models of contestants that run both in one process, one at a time."""
    return replace(models.target, threads=models.threads), replace(models.drafter, threads=models.threads)


def _load_alternation(models: Models) -> Alternation:
    logging.disable_progress_bar()
    return Alternation(*map(load_runner, _specs(models)))
