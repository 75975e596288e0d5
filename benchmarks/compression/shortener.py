"""Shortens the documents of tasks, as a server does, with a compressor that runs in an engine."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from actors.coordinator.request import Delta, Endpoint, Request
from actors.replica.in_process import Engine
from benchmarks.compression.task import Task
from decoding.prompt_positions import PromptPositions
from decoding.sampling.params import SamplingParams
from deployments.compression.chunks import LOOK_AHEAD, ChunkCompression
from deployments.compression.compressor import Compression, CompressionOptions, Compressor
from deployments.compression.pieces import split, stretches

METHODS = ("perplexity", "sentence", "attention", "random")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target gets."""

    tokens: Sequence[int]
    positions: PromptPositions | None = None


class Shortener:
    """A compressor. The control `random` drops tokens without looking at them."""

    def __init__(self, engine: Engine, model: str, compressor: Compressor) -> None:
        self._engine, self._compressor = engine, compressor
        self.tokenizer = compressor.tokenizer
        self._endpoint = Endpoint(model, model, None, 0, decode=lambda tokens: "")
        self._count = 0

    def whole(self, task: Task) -> Prompt:
        """Return the task's prompt as it is."""
        return Prompt(self._tokens(task.prompt))

    def read(self, task: Task, method: str) -> list[list[float]]:
        """Let the compressor read the task: log-probabilities or attention. They serve for any rate."""
        match method:
            case "attention":
                params = SamplingParams(
                    max_tokens=LOOK_AHEAD, min_tokens=LOOK_AHEAD, temperature=0, prompt_attention=True
                )
                answers = self._run(self._chunks(task, 0.5).passes, params)
                return [list(deltas[-1].prompt_attention or ()) for deltas in answers]
            case "perplexity" | "sentence":
                params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
                answers = self._run(self._texts(task, method, 0.5).passes, params)
                return [[token.logprob for token in deltas[0].prompt_logprobs or ()] for deltas in answers]
            case _:
                return []

    def shorten(self, task: Task, method: str, rate: float, reading: Sequence[Sequence[float]]) -> Prompt:
        """Return the task's prompt, shortened. reading: what `read` returned."""
        match method:
            case "attention":
                shortened = self._chunks(task, rate).result(reading)
                return Prompt(shortened.tokens, shortened.positions)
            case "perplexity" | "sentence":
                (document,) = self._texts(task, method, rate).result(reading)
            case _:
                (pieces,) = split([task.document], self._compressor.tokenizer)
                drawn = random.Random(task.prompt)
                document = "".join(piece.text for piece in pieces if drawn.random() < rate)
        return Prompt(self._tokens(f"{document}\n\n{task.question}"))

    def _chunks(self, task: Task, rate: float) -> ChunkCompression:
        parts = stretches(task.prompt, task.question, code=True)
        options = CompressionOptions("attention", rate=rate)
        compressor = self._compressor
        return ChunkCompression(
            self._tokens(task.prompt), parts, options, compressor.tokenizer, compressor.context_length
        )

    def _texts(self, task: Task, method: str, rate: float) -> Compression:
        return self._compressor.begin([task.document], CompressionOptions(method, rate=rate, question=task.question))

    def _tokens(self, text: str) -> list[int]:
        return list(self._compressor.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _run(self, texts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Delta]]:
        self._count += 1  # so that no pages are shared
        requests = [Request(self._endpoint, text, params, cache_salt=str(self._count)) for text in texts]
        return self._engine.generate(requests)
