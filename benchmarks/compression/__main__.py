r"""What prompt compression costs and gives: what is left of answers, and the time to the first token.

python -m benchmarks.compression --target /tmp/models/smollm2 --compressor models/smollm2-drafter \
    --output compression.json
python -m benchmarks.compression --target /tmp/models/smollm2 --compressor models/smollm2-drafter \
    --output compression.json --only ttft --lengths 4000 --plot compression.png

The first command measures what is left of answers, the second times the longest prompt at rate 0.25. Facts are hidden
in long text, and the last line asks for one of them. `random` drops tokens at random, as a control. What the output
file has is not measured again, so a long run may be interrupted.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from benchmarks.compression.accuracy import Outcome, Reader, outcomes
from benchmarks.compression.first_token import FirstToken, measure
from benchmarks.compression.shortener import METHODS, Shortener
from benchmarks.compression.task import make_task
from deployments.compression.compressor import Compressor
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from engine.model.runner import Runner

_RATE = 0.25  # of times to the first token


class Results:
    """The results so far, in a file if there is one."""

    def __init__(self, path: Path | None, options: dict[str, str]) -> None:
        self._path, self._options = path, options
        self.outcomes: list[Outcome] = []
        self.times: list[FirstToken] = []
        if path is not None and path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = [Outcome(**result) for result in document["outcomes"]]
            self.times = [FirstToken(**result) for result in document["first_token"]]

    def add(self, results: Sequence[Outcome | FirstToken]) -> None:
        """Print the results, and write them all."""
        for result in results:
            print(json.dumps(asdict(result)), flush=True)
        self.outcomes += [result for result in results if isinstance(result, Outcome)]
        self.times += [result for result in results if isinstance(result, FirstToken)]
        if self._path is not None:
            document = {
                "options": self._options,
                "outcomes": [asdict(result) for result in self.outcomes],
                "first_token": [asdict(result) for result in self.times],
            }
            self._path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print and write the results, and draw them."""
    options = _parser().parse_args(arguments)
    compressor_path = options.compressor or options.target
    results = Results(options.output, {name: str(value) for name, value in vars(options).items()})
    tokenizer = load_tokenizer(options.target)
    target = _runner("target", options.target, options.threads)
    compressor = _runner("compressor", compressor_path, options.threads)
    replicas = {"target": target, "compressor": compressor} if options.only == "ttft" else {"compressor": compressor}
    with Engine({name: ("target", runner) for name, runner in replicas.items()}) as engine:
        own = Compressor("compressor", load_tokenizer(compressor_path), compressor.max_length, has_target_tokens=True)
        shortener = Shortener(engine, "compressor", own)
        if options.only == "ttft":
            _measure_times(options, results, engine, shortener)
        else:
            _measure_accuracy(options, results, Reader(target, tokenizer), shortener)
    if options.plot:
        from benchmarks.compression.plot import draw

        draw(results.outcomes, results.times, options.plot)


def _measure_accuracy(options: argparse.Namespace, results: Results, reader: Reader, shortener: Shortener) -> None:
    known = {(outcome.prompt_tokens, outcome.seed) for outcome in results.outcomes}
    for tokens, seed in product(options.lengths, range(options.tasks)):
        if (tokens, seed) not in known:
            task = make_task(shortener.tokenizer, tokens, seed, facts=options.facts)
            rates = [rate for rate in options.rates if rate < 1]
            results.add(
                outcomes(reader, shortener, task, tokens=tokens, seed=seed, methods=options.methods, rates=rates)
            )


def _measure_times(options: argparse.Namespace, results: Results, engine: Engine, shortener: Shortener) -> None:
    tokens = max(options.lengths)
    known = {(time.prompt_tokens, time.method, time.rate) for time in results.times}
    wanted = [("none", 1.0), *((method, _RATE) for method in options.methods if method != "random")]
    task = make_task(shortener.tokenizer, tokens, 0, facts=options.facts)
    measure(
        engine,
        shortener,
        make_task(shortener.tokenizer, 200, 0, facts=2),
        tokens=200,
        method="attention",
        rate=0.5,
        repeats=1,
    )
    for method, share in wanted:
        if (tokens, method, share) not in known:
            results.add(
                [measure(engine, shortener, task, tokens=tokens, method=method, rate=share, repeats=options.repeats)]
            )


def _runner(name: str, path: str, threads: int) -> Runner:
    return load_runner(ModelSpec(name=name, path=path, device="cpu", slots=4, threads=threads))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="models/target", help="a folder")
    parser.add_argument("--compressor", help="a folder; by default the target's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 6000], help="tokens of prompts")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.33, 0.25, 0.2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tasks", type=int, default=10, help="of each length")
    parser.add_argument("--facts", type=int, default=3, help="in each document")
    parser.add_argument("--repeats", type=int, default=3, help="of each time to the first token")
    parser.add_argument("--only", choices=["accuracy", "ttft"], default="accuracy", help="what to measure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--plot", type=Path, help="PNG of all results so far")
    return parser


if __name__ == "__main__":
    main()
