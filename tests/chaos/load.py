"""Requests that are sent again and again, transcripts of their answers, and the threads that send them."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from decoding.sampling.logprobs import TokenLogprobs

R = TypeVar("R")  # what a request is to whoever sends it
_LOGPROB_TOLERANCE = 1e-3
_LONG_GAP_S = 0.3  # shorter ones are not kept
_PAUSE_S = 0.5  # after an error


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a stream delivered nothing, on the monotonic clock."""

    began_s: float
    ended_s: float

    def contains(self, at_s: float) -> bool:
        """Whether a fault at that time may have caused the gap."""
        return self.began_s - 0.5 < at_s < self.ended_s


@dataclass(slots=True)
class Transcript:
    """Everything that a client has received for a request, and when. Times are on the monotonic clock."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))  # by choice
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    gaps: list[Gap] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = field(default_factory=time.monotonic)

    def note_arrival(self) -> None:
        """Note that something has come."""
        now_s = time.monotonic()
        if now_s - self.last_s > _LONG_GAP_S:
            self.gaps.append(Gap(self.last_s, now_s))
        self.first_s, self.last_s = self.first_s or now_s, now_s

    @property
    def length(self) -> int:
        """Characters so far, of all choices."""
        return sum(map(len, list(self.texts.values())))

    def same_as(self, other: "Transcript") -> bool:
        """Whether the contents are equal, apart from gaps and rounding of log-probabilities."""
        mine, others = (
            (dict(answer.texts), answer.tokens, answer.finish, len(answer.logprobs), len(answer.prompt_logprobs))
            for answer in (self, other)
        )
        return mine == others and all(
            abs(a.logprob - b.logprob) < _LOGPROB_TOLERANCE
            for ours, theirs in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs))
            for a, b in zip(ours, theirs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Case(Generic[R]):
    """A request that can be sent many times."""

    kind: str
    number: int
    request: R


Ask = Callable[[R, Transcript], None]  # sends a request and writes the transcript; raises what goes wrong


class Streams(Generic[R]):
    """Threads that send one case after the other, until `finish` or for a number of rounds over all cases."""

    def __init__(self, ask: Ask[R], cases: Sequence[Case[R]], count: int, *, seed: int = 0) -> None:
        self.answers: list[tuple[Case[R], Transcript]] = []
        self.current: list[tuple[Case[R], Transcript] | None] = [None] * count
        self._ask, self._cases = ask, list(cases)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._remaining: list[Case[R]] = []
        self._rounds: float = 0
        self._threads = [threading.Thread(target=self._run, args=(index,), daemon=True) for index in range(count)]

    def start(self, *, rounds: float = float("inf")) -> None:
        """Start the threads. rounds: how often each case is sent."""
        self._rounds = rounds
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[tuple[Case[R], Transcript]]:
        """Send no further requests, wait for pending ones, and return all answers."""
        with self._lock:
            if self._rounds == float("inf"):
                self._remaining, self._rounds = [], 0
        for thread in self._threads:
            thread.join()
        return self.answers

    def _next(self) -> Case[R] | None:
        with self._lock:
            if not self._remaining:
                if self._rounds <= 0:
                    return None
                self._rounds -= 1
                self._remaining = self._rng.sample(self._cases, len(self._cases))
            return self._remaining.pop()

    def _run(self, index: int) -> None:
        while (case := self._next()) is not None:
            answer = Transcript()
            self.current[index] = case, answer
            ask_into(self._ask, case, answer)
            with self._lock:
                self.answers.append((case, answer))
            if answer.error is not None:
                time.sleep(_PAUSE_S)


def ask_into(ask: Ask[R], case: Case[R], answer: Transcript) -> Transcript:
    """Send a case, and note what it comes to."""
    try:
        ask(case.request, answer)
    except Exception as error:  # whatever goes wrong, the answer is lost
        answer.error = f"{type(error).__name__}: {error}"
    answer.last_s = time.monotonic()
    return answer
