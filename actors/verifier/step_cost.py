"""The cost of a target step by its number of tokens: measured at the start, then corrected by each step."""

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from copy import deepcopy
from itertools import pairwise

from engine.model.cuda import StepTimer
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.thread_choice import few_threads

_SMOOTHING = 0.1  # weight of the newest step
_RELAXING = 0.003  # weight per step with which the factors of other sizes follow the mean …
_FOLLOWING = 0.03  # … and, without a step of their own for so long, that of a step so many times as large or small
_ALIKE, _RECENT_STEPS = 4, 32
_MEASURED_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_FIRST_SIZES = (1, 9, 33)  # of a runner that is measured while its first requests run
_RECORDED_TOKENS = 9  # steps of up to so many are recorded first, as those of usual sizes are later
_ROUNDS = 8
_LEAST_TOKENS, _LONG_S = 17, 0.1  # of a step from which the time of larger ones may be extrapolated
_PROPORTIONAL = 0.8  # a proportional step takes at least this share of what the size below it predicts
_MEASURING_S = 0.05  # of each size; the server waits meanwhile, and the first requests' steps measure on
_AGREEING = 1.1  # ratio of a size's best two times, until which it may take so many times as long
_DOUBTING = 8


class StepCost:
    """A curve through times measured at some sizes, with a factor at each size that later steps correct.

    Factors of sizes without steps follow those of similar sizes soon, because other processes slow down all of them,
    and the rest slowly, so that no stale time stays for ever.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], padded: Sequence[int] = ()) -> None:
        """
        sizes: ascending numbers of tokens.
        seconds: of a step of each size. The curve never falls, and never rises faster than in proportion, because
            several steps do what a larger one does.
        padded: ascending sizes that steps are padded to, if they are; larger steps are not.
        """
        self._padded = list(padded)
        self._sizes = list(sizes)
        self._seconds = [*seconds[:1]]
        for (smaller, size), own_s in zip(pairwise(sizes), seconds[1:], strict=True):
            self._seconds.append(min(max(own_s, self._seconds[-1]), self._seconds[-1] * size / smaller))
        self._factors = [1.0] * len(self._sizes)
        self._current = self._seconds
        self._factor = 1.0  # running mean over all steps
        self._notes, self._noted = 0, [-_RECENT_STEPS] * len(self._sizes)  # steps, and when each size had one last

    def replace(self, other: "StepCost") -> None:
        """Forget what was measured, and take over what another knows."""
        vars(self).update(vars(deepcopy(other)))

    def note(self, tokens: int, seconds: float) -> None:
        tokens = self._pad(tokens)
        self._notes += 1
        factor = seconds / self._interpolate(self._seconds, tokens)
        self._factor += _SMOOTHING * (factor - self._factor)
        near = {
            min(bisect_left(self._sizes, tokens), len(self._sizes) - 1),
            max(bisect_right(self._sizes, tokens) - 1, 0),
        }
        for index, size_factor in enumerate(self._factors):
            if index in near:
                self._factors[index] += _SMOOTHING * (factor - size_factor)
                self._noted[index] = self._notes
            elif self._notes > self._noted[index] + _RECENT_STEPS and _are_alike(self._sizes[index], tokens):
                self._factors[index] += _FOLLOWING * (factor - size_factor)
            else:
                self._factors[index] += _RELAXING * (self._factor - size_factor)
        self._current = [factor * base for factor, base in zip(self._factors, self._seconds, strict=True)]

    def __call__(self, tokens: int) -> float:
        return self._interpolate(self._current, self._pad(tokens))

    def _pad(self, tokens: int) -> int:
        index = bisect_left(self._padded, tokens)
        return self._padded[index] if index < len(self._padded) else tokens

    def _interpolate(self, seconds: Sequence[float], tokens: int) -> float:
        """Interpolate linearly. Beyond the last size, time is proportional to tokens, because compute bounds it."""
        index = bisect_left(self._sizes, tokens)
        if index == 0:
            return seconds[0]
        if index == len(self._sizes):
            return seconds[-1] * tokens / self._sizes[-1]
        below, above = self._sizes[index - 1], self._sizes[index]
        share = (tokens - below) / (above - below)
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])


def _are_alike(size: int, other: int) -> bool:
    return max(size, other) <= _ALIKE * min(size, other)


def measure_step_cost(runner: Runner) -> StepCost:
    """Time steps of a few sizes on an idle runner, which also warms it up: roughly, if it practises later."""
    if runner.practises_later:
        sizes = [size for size in _FIRST_SIZES if size <= runner.max_query]
        with few_threads(runner.model):
            cost = StepCost(sizes, [_time_step(runner, tokens, 0) for tokens in sizes])
    else:
        cost = _result(step_cost_in_parts(runner, 0))
    runner.cache.clear_all()
    return cost


def _result(parts: Generator[None, None, StepCost]) -> StepCost:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            cost: StepCost = end.value
            return cost


def step_cost_in_parts(runner: Runner, slot: int) -> Generator[None, None, StepCost]:
    """Time steps of a few sizes, in parts. slot: a free one, which is overwritten.

    The minimum of several rounds counts, because other replicas may be starting on the same machine. A small size whose
    best two times differ takes part in more, long steps in few, where noise matters less. Once a step is long and its
    time proportional to its tokens, larger ones are not measured: their time is proportional, too.
    """
    sizes = [size for size in runner.padded_sizes or _MEASURED_SIZES if size <= runner.max_query]
    runner.logits([RowInput(slot=slot, start=0, tokens=[0])])
    for tokens in sizes:
        if tokens <= _RECORDED_TOKENS:
            runner.record(tokens, slot)
            yield
    seconds: list[float] = []
    while len(seconds) < len(sizes) and not _is_proportional(sizes, seconds):
        tokens = sizes[len(seconds)]
        seconds.append(_time_step(runner, tokens, slot))
        if _is_proportional(sizes, seconds):  # or something else was running
            seconds[-1] = min(seconds[-1], _time_step(runner, tokens, slot))
        yield
    times = [[step_s] for step_s in seconds]
    for _ in range(_DOUBTING * _ROUNDS - 1):
        for tokens, own in zip(sizes, times, strict=False):
            if _is_in_doubt(tokens, own):
                own.append(_time_step(runner, tokens, slot))
                yield
    return StepCost(sizes[: len(times)], [*map(min, times)], runner.padded_sizes)


def _is_in_doubt(tokens: int, times: Sequence[float]) -> bool:
    """Whether to time a size again. times: of its steps, in seconds."""
    best, *others = sorted(times)
    agree = tokens > _RECORDED_TOKENS or (bool(others) and others[0] <= _AGREEING * best)
    patience = 1 if agree else _DOUBTING
    return len(times) < patience * _ROUNDS and sum(times) < patience * _MEASURING_S


def _is_proportional(sizes: Sequence[int], seconds: Sequence[float]) -> bool:
    """Whether the last step was long, and its time proportional to its tokens. seconds: of the first sizes."""
    last = len(seconds) - 1
    if last < 1 or sizes[last] < _LEAST_TOKENS or seconds[last] < _LONG_S:
        return False
    return seconds[last] * sizes[last - 1] > _PROPORTIONAL * seconds[last - 1] * sizes[last]


def _time_step(runner: Runner, tokens: int, slot: int) -> float:
    timer = StepTimer(runner.device)
    best = runner.logits([RowInput(slot=slot, start=0, tokens=[0] * tokens)]).argmax(dim=-1)
    timer.stop()
    best.tolist()
    return timer.seconds()
