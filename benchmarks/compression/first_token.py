"""Seconds to the first token, compression included. Needs a quiet machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from actors.coordinator.request import Endpoint, Request
from actors.replica.in_process import Engine
from benchmarks.compression.shortener import Prompt, Shortener
from benchmarks.compression.task import Task
from decoding.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Medians over the repetitions, and processor time, which load disturbs less."""

    prompt_tokens: int  # about, of the whole prompt
    method: str
    rate: float
    compress_s: float
    first_token_s: float  # with the compression
    processor_s: float  # of all threads, with the compression


def measure(
    engine: Engine, shortener: Shortener, task: Task, *, tokens: int, method: str, rate: float, repeats: int
) -> FirstToken:
    """Time one method on one task; rate 1: without compression."""
    compress_s, first_token_s, processor_s = [], [], []
    for repeat in range(repeats):
        began_s, processor_began_s = time.perf_counter(), time.process_time()
        prompt = shortener.whole(task) if rate == 1 else _shorten(shortener, task, method, rate)
        compress_s.append(time.perf_counter() - began_s)
        _first_token(engine, prompt, salt=f"{method} {rate} {repeat}")
        first_token_s.append(time.perf_counter() - began_s)
        processor_s.append(time.process_time() - processor_began_s)
    medians = [round(median(values), 3) for values in (compress_s, first_token_s, processor_s)]
    return FirstToken(tokens, method, rate, *medians)


def _shorten(shortener: Shortener, task: Task, method: str, rate: float) -> Prompt:
    return shortener.shorten(task, method, rate, shortener.read(task, method))


def _first_token(engine: Engine, prompt: Prompt, salt: str) -> None:
    """Answer with one token. salt: so that no pages are shared."""
    endpoint = Endpoint("target", "target", None, 0, decode=lambda tokens: "")
    params = SamplingParams(max_tokens=1, temperature=0)
    tokens: Sequence[int] = prompt.tokens
    engine.generate([Request(endpoint, tokens, params, prompt_positions=prompt.positions, cache_salt=salt)])
