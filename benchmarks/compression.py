"""What prompt compression costs and gives: time to the first token, likelihood of the full prompt's answer, retrieval.

python -m benchmarks.compression --target /tmp/models/smollm2 --output benchmarks/results/compression.json

Facts are hidden in long text, and the last line asks for one of them. `random` drops tokens at random, as a control.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Endpoint, Request
from actors.loading.checkpoint import ModelSpec, load_tokenizer
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from decoding.sampling.params import SamplingParams
from deployments.compression.compressor import CompressionOptions, Compressor
from deployments.compression.pieces import split

_THINGS = ("box", "door", "boat", "lamp", "tower", "wagon", "garden", "bridge", "drum", "kite")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
_FILLER = (
    "The morning was quiet and the street was almost empty.",
    "Some people walked to the market, and others stayed at home.",
    "It had rained during the night, so the grass was wet.",
    "Nobody knew exactly when the next train would arrive.",
    "A dog slept in the sun while children played nearby.",
    "The old clock in the hall struck nine times.",
)
_CONTEXT = 8192
_ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Task:
    """A text with hidden facts, and a question about one of them."""

    document: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the tasks of one length, at one rate, with one method."""

    prompt_tokens: int
    method: str
    rate: float
    kept: float  # share of the whole prompt's tokens
    compress_s: float
    first_token_s: float  # compression included
    log_likelihood: float  # of the full prompt's answer, nats per token
    retrieved: float  # share of answers that have the number


def make_task(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, *, facts: int = 8) -> Task:
    """Make a task of about so many tokens."""
    drawn = random.Random(seed)
    names = drawn.sample(list(product(_COLOURS, _THINGS)), facts)
    numbers = [str(drawn.randrange(1000, 10_000)) for _ in names]
    hidden = [
        f"The code of the {colour} {thing} is {number}." for (colour, thing), number in zip(names, numbers, strict=True)
    ]
    sentences: list[str] = []
    per_sentence = fmean(len(tokenizer(text).input_ids) for text in _FILLER)
    while len(sentences) * per_sentence < tokens - 14 * facts:
        sentences.append(drawn.choice(_FILLER))
    for fact in hidden:
        sentences.insert(drawn.randrange(len(sentences) + 1), fact)
    paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, len(sentences), 6)]
    asked = drawn.randrange(facts)
    question = f"What is the code of the {names[asked][0]} {names[asked][1]}? Answer with the number."
    return Task("\n\n".join(paragraphs), question, numbers[asked])


class Bench:
    """A target and a compressor in one process."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, compressor: Compressor) -> None:
        self._engine, self._tokenizer, self._compressor = engine, tokenizer, compressor
        self._ids = iter(range(1, 1 << 30))

    def measure(self, tasks: Sequence[Task], tokens: int, method: str, rate: float) -> Result:
        """Answer all tasks with and without compression."""
        kept, compress_s, first_s, likelihoods, hits = [], [], [], [], []
        for index, task in enumerate(tasks):
            full = self._prompt(task, task.document)
            _, answer = self._answer(full)
            began_s = time.perf_counter()
            prompt = self._prompt(task, self._compress(task, method, rate, seed=index))
            compress_s.append(time.perf_counter() - began_s)
            first_token_s, text = self._answer(prompt)
            kept.append(len(prompt) / len(full))
            first_s.append(compress_s[-1] + first_token_s)
            likelihoods.append(self._likelihood(prompt, answer))
            hits.append(task.answer in self._tokenizer.decode(text))
        figures = [fmean(values) for values in (kept, compress_s, first_s, likelihoods, hits)]
        return Result(tokens, method, rate, *(round(figure, 4) for figure in figures))

    def _compress(self, task: Task, method: str, rate: float, seed: int) -> str:
        if rate == 1:
            return task.document
        if method == "random":
            (pieces,) = split([task.document], self._compressor.tokenizer)
            drawn = random.Random(seed)
            return "".join(piece.text for piece in pieces if drawn.random() < rate)
        options = CompressionOptions(method, rate=rate, question=task.question)
        compression = self._compressor.begin([task.document], options)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        answers = self._engine.generate([self._request("compressor", line, params) for line in compression.passes])
        return compression.result([[token.logprob for token in deltas[0].prompt_logprobs or ()] for deltas in answers])[
            0
        ]

    def _prompt(self, task: Task, document: str) -> list[int]:
        turns = [{"role": "user", "content": f"{document}\n\n{task.question}"}]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(str(text), add_special_tokens=False, verbose=False).input_ids)

    def _answer(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and the greedy answer."""
        params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0)
        began_s = time.perf_counter()
        stream = self._engine.stream(self._request("target", prompt, params))
        first = next(stream)
        first_s = time.perf_counter() - began_s
        return first_s, [*first.tokens, *(token for delta in stream for token in delta.tokens)]

    def _likelihood(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        ((first, *_),) = self._engine.generate([self._request("target", [*prompt, *answer], params)])
        return fmean(token.logprob for token in (first.prompt_logprobs or ())[-len(answer) :])

    def _request(self, model: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        endpoint = Endpoint(model, model, None, 0, decode=_no_text)
        return Request(endpoint, prompt, params, cache_salt=str(next(self._ids)))  # so that no pages are shared


def _no_text(tokens: list[int]) -> str:
    return ""


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw each measure against the rate, a line for each method, a column for each length."""
    from matplotlib.figure import Figure

    lengths = sorted({result.prompt_tokens for result in results})
    measures: list[tuple[str, Callable[[Result], float]]] = [
        ("first token, s", lambda result: result.first_token_s),
        ("log-likelihood, nats per token", lambda result: result.log_likelihood),
        ("retrieved", lambda result: result.retrieved),
    ]
    figure = Figure(figsize=(4 * len(lengths), 9), layout="constrained")
    grid = figure.subplots(len(measures), len(lengths), squeeze=False)
    for (label, value), row in zip(measures, grid, strict=True):
        for length, axes in zip(lengths, row, strict=True):
            for method in dict.fromkeys(result.method for result in results):
                line = [result for result in results if (result.prompt_tokens, result.method) == (length, method)]
                axes.plot([result.rate for result in line], [value(result) for result in line], "o-", label=method)
            axes.set(xlabel="rate", ylabel=label, title=f"{length} tokens")
    grid[0][0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print and write the results, and draw them."""
    options = _options()
    lengths, rates, methods = (list(getattr(options, name)) for name in ("lengths", "rates", "methods"))
    tokenizer, own = load_tokenizer(options.target), load_tokenizer(options.compressor or options.target)
    runners = {
        name: load_runner(
            ModelSpec(name=name, path=path, device="cpu", slots=8, max_length=_CONTEXT, threads=options.threads)
        )
        for name, path in (("target", options.target), ("compressor", options.compressor or options.target))
    }
    results: list[Result] = []
    with Engine({name: ("target", runner) for name, runner in runners.items()}) as engine:
        bench = Bench(engine, tokenizer, Compressor("compressor", own, _CONTEXT))
        for length, method, rate in product(lengths, methods, rates):
            tasks = [make_task(tokenizer, length, seed) for seed in range(options.tasks)]
            results.append(bench.measure(tasks, length, method, rate))
            print(json.dumps(asdict(results[-1])), flush=True)
    if options.output:
        document = {"options": {name: str(value) for name, value in vars(options).items()}}
        document_text = json.dumps({**document, "results": [asdict(result) for result in results]}, indent=1)
        options.output.write_text(document_text + "\n", encoding="utf-8")
        draw(results, options.output.with_suffix(".png"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="models/target", help="a folder")
    parser.add_argument("--compressor", help="a folder; by default the target's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 6000], help="tokens of prompts")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 0.5, 0.33, 0.25, 0.2])
    parser.add_argument("--methods", nargs="+", default=["perplexity", "sentence", "random"])
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
