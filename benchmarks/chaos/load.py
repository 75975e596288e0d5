"""Requests of every kind, streams that repeat them, and transcripts of the answers. Must not know about faults."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.coordinator.request import Delta, Endpoint, Request
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.drafts.ngram import NgramOptions
from decoding.errors import ConsortError
from decoding.sampling.params import SamplingParams, Structure
from decoding.sampling.sampler import TokenLogprobs
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts

PROMPTS = Path("models/heldout.jsonl")
_LOGPROB_TOLERANCE = 1e-3
_LONG_GAP_S = 0.1  # shorter ones are not kept

# Parameters of requests by kind; prompts and seeds differ within a kind.
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
    """A time in which a stream delivered nothing, on the monotonic clock."""

    began_s: float
    ended_s: float


@dataclass(slots=True)
class Transcript:
    """Everything that a client received for a request, and the long gaps in between."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    gaps: list[Gap] = field(default_factory=list)

    def same_as(self, other: "Transcript") -> bool:
        """Whether the contents are equal, apart from gaps and rounding of log-probabilities."""
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
    """A request that can be sent many times."""

    kind: str
    request: Request

    def fresh(self) -> Request:
        """Return the same request under a new id."""
        return replace(self.request, request_id=random.getrandbits(63))


def make_cases(target: Path, count: int, new_tokens: int, *, seed: int) -> list[Case]:
    """Make requests of all kinds in turn, with random prompts and seeds."""
    tokenizer: Any = load_tokenizer(str(target))
    rng = random.Random(seed)
    endpoints = _endpoints(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
    cases = []
    for index, text in enumerate(rng.sample(read_prompts(PROMPTS), count)):
        kind = list(KINDS)[index % len(KINDS)]
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
    """Threads that send one case after the other, until `finish` or for a number of rounds over all cases."""

    def __init__(self, ask: Callable[[Case], Transcript], cases: Sequence[Case], count: int, *, seed: int) -> None:
        self.answers: list[tuple[Case, Transcript]] = []
        self._ask, self._cases = ask, list(cases)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._remaining: list[Case] = []
        self._rounds: float = 0
        self._threads = [threading.Thread(target=self._run, name=f"stream {n}", daemon=True) for n in range(count)]

    def start(self, *, rounds: float = float("inf")) -> None:
        """Start the threads. rounds: how often each case is sent."""
        self._rounds = rounds
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[tuple[Case, Transcript]]:
        """Send no further requests, wait for pending ones, and return all answers."""
        with self._lock:
            if self._rounds == float("inf"):
                self._remaining, self._rounds = [], 0
        for thread in self._threads:
            thread.join()
        return self.answers

    def _next(self) -> Case | None:
        with self._lock:
            if not self._remaining:
                if self._rounds <= 0:
                    return None
                self._rounds -= 1
                self._remaining = self._rng.sample(self._cases, len(self._cases))
            return self._remaining.pop()

    def _run(self) -> None:
        while (case := self._next()) is not None:
            answer = self._ask(case)
            with self._lock:
                self.answers.append((case, answer))


def collect(deltas: Iterable[Delta]) -> Transcript:
    """Collect an answer from its deltas, with its gaps and its error, if any."""
    answer = Transcript()
    last_s = time.monotonic()
    try:
        for delta in deltas:
            now_s = time.monotonic()
            if now_s - last_s > _LONG_GAP_S:
                answer.gaps.append(Gap(last_s, now_s))
            last_s = now_s
            answer.text += delta.text
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs or ()
            answer.finish = delta.finish
    except ConsortError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer
