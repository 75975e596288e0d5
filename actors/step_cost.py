"""What a target step costs, as a function of its tokens, padding included: measured at start, scaled ever after."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from actors.runner import RowInput, Runner

_SMOOTHING = 0.1  # weight of the newest time
_MEASURED_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_REPETITIONS = 3
_MEASURING_S = 5.0  # no further size is begun after that


class StepCost:
    """A curve through times measured at some sizes, which never falls, and a factor that follows what steps take.

    Only the factor is learnt while serving: it tells busy from idle, and a long cache from a short one, while the
    curve's shape decides how many tokens pay. Learning each size by itself would leave stale times where no step goes.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """sizes: ascending numbers of tokens; seconds: what each took."""
        self._sizes = list(sizes)
        self._seconds = list(accumulate(seconds, max))
        self._factor = 1.0

    def note(self, tokens: int, seconds: float) -> None:
        """Count one step of so many tokens."""
        self._factor += _SMOOTHING * (seconds / self._curve_s(tokens) - self._factor)

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        return self._factor * self._curve_s(tokens)

    def _curve_s(self, tokens: int) -> float:
        """Straight lines between the measured sizes; beyond the last, in proportion: bound by compute."""
        at = bisect_left(self._sizes, tokens)
        if at == 0:
            return self._seconds[0]
        if at == len(self._sizes):
            return self._seconds[-1] * tokens / self._sizes[-1]
        below, above = self._sizes[at - 1], self._sizes[at]
        share = (tokens - below) / (above - below)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


def measure_step_cost(runner: Runner) -> StepCost:
    """Time steps of a few sizes on an idle runner; doubles as its warm-up. Scribbles over slot 0."""
    sizes: list[int] = []
    seconds: list[float] = []
    end_s = time.perf_counter() + _MEASURING_S
    for tokens in (size for size in _MEASURED_SIZES if size <= runner.max_query):
        row = RowInput(slot=0, start=0, tokens=[0] * tokens)
        runner.forward([row])
        began_s = time.perf_counter()
        for _ in range(_REPETITIONS):
            runner.forward([row]).argmax(dim=-1).tolist()
        sizes.append(tokens)
        seconds.append((time.perf_counter() - began_s) / _REPETITIONS)
        if time.perf_counter() > end_s:
            break  # a slow model: larger sizes are taken to cost in proportion
    return StepCost(sizes, seconds)
