"""How requests to a target fared in the last half minute, for scaling by what users feel."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from deployments.scaling.policy import Felt

_WINDOW_S = 30.0
_MOST = 1000  # requests that are looked at
_LEAST = 5  # requests, before anything is known
_SLOW = 0.9  # share of requests that fared at least as well as what is reported


class _Answer(NamedTuple):
    ended_s: float
    tokens_per_s: float
    tokens: int
    drafted: int  # of them, by drafters in replicas of their own


class RecentSpeeds:
    """First-token times and answers of one target's requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._firsts: deque[tuple[float, float]] = deque(maxlen=_MOST)  # when, and after how many seconds
        self._answers: deque[_Answer] = deque(maxlen=_MOST)

    def note_first(self, ttft_s: float) -> None:
        self._firsts.append((self._clock(), ttft_s))

    def note_answer(self, tokens_per_s: float, tokens: int, drafted: int) -> None:
        self._answers.append(_Answer(self._clock(), tokens_per_s, tokens, drafted))

    def felt(self) -> Felt:
        since_s = self._clock() - _WINDOW_S
        firsts = sorted(seconds for at_s, seconds in self._firsts if at_s >= since_s)
        answers = [answer for answer in self._answers if answer.ended_s >= since_s]
        speeds = sorted((answer.tokens_per_s for answer in answers), reverse=True)
        tokens = sum(answer.tokens for answer in answers)
        return Felt(
            ttft_s=_slow(firsts),
            tokens_per_s=_slow(speeds),
            drafted=sum(answer.drafted for answer in answers) / tokens if len(answers) >= _LEAST else 1.0,
        )


def _slow(values: list[float]) -> float:
    """Return the value of the slow tenth, of values from good to bad; 0 if there are too few."""
    return values[min(int(_SLOW * len(values)), len(values) - 1)] if len(values) >= _LEAST else 0.0
