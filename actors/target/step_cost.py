"""What a target step costs, as a function of its tokens: measured at start, corrected ever after."""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from actors.model.forward_input import RowInput
from actors.model.runner import Runner

_SMOOTHING = 0.1  # weight of the newest time
_RELAXING = 0.003  # how fast sizes without steps follow the others, per step
_MEASURED_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_ROUNDS = 8
_MEASURING_S = 3.0  # no further round is begun after that


class StepCost:
    """A curve through times measured at some sizes, and a factor at each size that follows what steps take.

    Factors of sizes without steps slowly follow the rest, so that no stale time, too high or too low, stays for ever.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """sizes: ascending numbers of tokens; seconds: what each took. The curve never falls."""
        self._sizes = list(sizes)
        self._seconds = list(accumulate(seconds, max))
        self._factors = [1.0] * len(self._sizes)
        self._current = self._seconds
        self._factor = 1.0  # of all steps

    def note(self, tokens: int, seconds: float) -> None:
        """Count one step of so many tokens."""
        factor = seconds / self._interpolate(self._seconds, tokens)
        self._factor += _SMOOTHING * (factor - self._factor)
        near = {
            min(bisect_left(self._sizes, tokens), len(self._sizes) - 1),
            max(bisect_right(self._sizes, tokens) - 1, 0),
        }
        for at in range(len(self._sizes)):
            if at in near:
                self._factors[at] += _SMOOTHING * (factor - self._factors[at])
            else:
                self._factors[at] += _RELAXING * (self._factor - self._factors[at])
        self._current = [factor * base for factor, base in zip(self._factors, self._seconds, strict=True)]

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        return self._interpolate(self._current, tokens)

    def _interpolate(self, seconds: Sequence[float], tokens: int) -> float:
        """Straight lines between the measured sizes; beyond the last, in proportion: bound by compute."""
        at = bisect_left(self._sizes, tokens)
        if at == 0:
            return seconds[0]
        if at == len(self._sizes):
            return seconds[-1] * tokens / self._sizes[-1]
        below, above = self._sizes[at - 1], self._sizes[at]
        share = (tokens - below) / (above - below)
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def measure_step_cost(runner: Runner) -> StepCost:
    """Time steps of a few sizes on an idle runner; doubles as its warm-up. Scribbles over slot 0.

    The least of several rounds counts: other replicas are starting on the same machine.
    """
    sizes = [size for size in _MEASURED_SIZES if size <= runner.max_query]
    seconds = [math.inf] * len(sizes)
    runner.logits([RowInput(slot=0, start=0, tokens=[0])])
    end_s = time.perf_counter() + _MEASURING_S
    for _ in range(_ROUNDS):
        for at, tokens in enumerate(sizes):
            began_s = time.perf_counter()
            runner.logits([RowInput(slot=0, start=0, tokens=[0] * tokens)]).argmax(dim=-1).tolist()
            seconds[at] = min(seconds[at], time.perf_counter() - began_s)
        if time.perf_counter() > end_s:
            break
    return StepCost(sizes, seconds)
