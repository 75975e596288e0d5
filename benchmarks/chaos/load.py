"""Requests of every kind, streams that ask them again and again, and what they got for an answer.

Knows nothing of faults: an answer is compared with what the same request got when nothing went wrong.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loading.checkpoint import load_tokenizer
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.blending.params import BlendParams
from decoding.drafts.ngram import NgramOptions
from decoding.errors import ConsortError
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.params import SamplingParams, Structure
from training.heldout import read_prompts

PROMPTS = Path("models/heldout.jsonl")
_LOGPROB_TOLERANCE = 1e-3
_LONG_GAP_S = 0.1  # shorter ones are not kept

# What differs between requests, beside their prompts and seeds.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.02},
    "log-probabilities": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
    "stop string": {"temperature": 0.7, "stop": ("\n\n", "return")},
    "JSON": {
        "temperature": 0.8,
        "structure": Structure(kind="json", definition='{"type": "array", "items": {"type": "integer"}}'),
    },
    "plain": {"temperature": 1.0},
    "n-grams": {"temperature": 0.3},
    "ensemble": {"temperature": 0.7},
}


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a stream stood still, by the monotonic clock."""

    began_s: float
    ended_s: float


@dataclass(slots=True)
class Answer:
    """All that a client was told, and how long it waited in between."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    gaps: list[Gap] = field(default_factory=list)

    def same_as(self, other: "Answer") -> bool:
        """Whether the client was told the same, whatever the time it took."""
        mine, others = (
            (answer.text, answer.tokens, answer.finish, len(answer.logprobs), len(answer.prompt_logprobs))
            for answer in (self, other)
        )
        return mine == others and all(
            abs(a.logprob - b.logprob) < _LOGPROB_TOLERANCE
            for ours, theirs in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs))
            for a, b in zip(ours, theirs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A request that can be asked again and again."""

    kind: str
    request: Request

    def fresh(self) -> Request:
        """The same request under an id of its own."""
        return replace(self.request, request_id=random.getrandbits(63))


def make_cases(target: Path, count: int, new_tokens: int, *, seed: int) -> list[Case]:
    """Requests of all kinds in turn, with the prompts and seeds that `seed` draws."""
    tokenizer: Any = load_tokenizer(str(target))
    rng = random.Random(seed)
    endpoints = _endpoints(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    cases = []
    for at, text in enumerate(rng.sample(read_prompts(PROMPTS), count)):
        kind = list(KINDS)[at % len(KINDS)]
        length = new_tokens if kind == "ensemble" else rng.choice([new_tokens, 2 * new_tokens, 4 * new_tokens])
        params = SamplingParams(
            max_tokens=length, eos_token_ids=(tokenizer.eos_token_id,), seed=rng.getrandbits(62), **KINDS[kind]
        )
        prompt = tokenizer(text)["input_ids"]
        cases.append(Case(kind, Request(endpoints.get(kind, endpoints["pair"]), prompt, params, kind != "plain")))
    return cases


def _endpoints(decode: Callable[[list[int]], str]) -> dict[str, Endpoint]:
    pair = Endpoint("pair", "target", "drafter", 4, decode)
    blend = BlendParams(kind="mixture", weights=(0.6, 0.4))
    return {
        "pair": pair,
        "n-grams": replace(pair, ngram=NgramOptions()),
        "ensemble": replace(pair, members=["member"], ensemble=EnsembleOptions(blend=blend)),
    }


class Streams:
    """Threads that ask one case after the other until told to stop, or until all cases were asked so often."""

    def __init__(self, ask: Callable[[Case], Answer], cases: Sequence[Case], count: int, *, seed: int) -> None:
        self.answers: list[tuple[Case, Answer]] = []
        self._ask, self._cases = ask, list(cases)
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._left: list[Case] = []
        self._rounds: float = 0
        self._threads = [threading.Thread(target=self._run, name=f"stream {n}", daemon=True) for n in range(count)]

    def start(self, *, rounds: float = float("inf")) -> None:
        """rounds: how often each case is asked."""
        self._rounds = rounds
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[tuple[Case, Answer]]:
        """Begin nothing new, wait for what has begun, and return all answers."""
        with self._lock:
            if self._rounds == float("inf"):
                self._left, self._rounds = [], 0
        for thread in self._threads:
            thread.join()
        return self.answers

    def _next(self) -> Case | None:
        with self._lock:
            if not self._left:
                if self._rounds <= 0:
                    return None
                self._rounds -= 1
                self._left = self._chance.sample(self._cases, len(self._cases))
            return self._left.pop()

    def _run(self) -> None:
        while (case := self._next()) is not None:
            answer = self._ask(case)
            with self._lock:
                self.answers.append((case, answer))


def collect(deltas: Iterable[Delta]) -> Answer:
    """The answer that arrives in deltas, and its gaps; an error ends it."""
    answer = Answer()
    heard_s = time.monotonic()
    try:
        for delta in deltas:
            now_s = time.monotonic()
            if now_s - heard_s > _LONG_GAP_S:
                answer.gaps.append(Gap(heard_s, now_s))
            heard_s = now_s
            answer.text += delta.text
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs or ()
            answer.prompt_logprobs += delta.prompt_logprobs or ()
            answer.finish = delta.finish
    except ConsortError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer
