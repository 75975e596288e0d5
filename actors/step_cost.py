"""What a target step costs, as a function of its tokens, padding included: measured at start, kept up to date."""

import time
from bisect import bisect_left

from actors.runner import RowInput, Runner

_MEASURED_SIZES = (1, 2, 3, 5, 9, 17, 33)
_REPETITIONS = 3
_MEASURING_S = 5.0  # no further size is begun after that
_SMOOTHING = 0.1  # weight of the newest time
_EXACT_SIZES = 16  # beyond, sizes share a mean with others up to an eighth larger


class StepCost:
    """Running means of step times at the sizes seen, linear in between."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def note(self, tokens: int, seconds: float) -> None:
        """Count one step of so many tokens."""
        size = _representative(tokens)
        at = bisect_left(self._sizes, size)
        if at < len(self._sizes) and self._sizes[at] == size:
            self._seconds[at] += _SMOOTHING * (seconds - self._seconds[at])
        else:
            self._sizes.insert(at, size)
            self._seconds.insert(at, seconds)

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of so many tokens. At least one size must have been noted."""
        at = bisect_left(self._sizes, tokens)
        if at == 0:
            return self._seconds[0]
        if at == len(self._sizes):
            return self._seconds[-1] * tokens / self._sizes[-1]  # unseen and larger: assume it is bound by compute
        below, above = self._sizes[at - 1], self._sizes[at]
        share = (tokens - below) / (above - below)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


def _representative(tokens: int) -> int:
    if tokens <= _EXACT_SIZES:
        return tokens
    unit = 1 << (tokens.bit_length() - 4)
    return tokens // unit * unit


def measure_step_cost(runner: Runner) -> StepCost:
    """Time steps of a few sizes on an idle runner; doubles as its warm-up. Scribbles over slot 0."""
    cost = StepCost()
    end_s = time.perf_counter() + _MEASURING_S
    for tokens in (size for size in _MEASURED_SIZES if size <= runner.max_query):
        row = RowInput(slot=0, start=0, tokens=[0] * tokens)
        runner.forward([row])
        began_s = time.perf_counter()
        for _ in range(_REPETITIONS):
            runner.forward([row]).argmax(dim=-1).tolist()
        cost.note(tokens, (time.perf_counter() - began_s) / _REPETITIONS)
        if time.perf_counter() > end_s:
            break  # a slow model: steps will tell the rest
    return cost
