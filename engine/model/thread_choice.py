"""How many threads a model computes with on a CPU: fewer while other processes want the same cores.

All threads wait for each other after every operator. One that has to share its core stops all of them, for as long as
the system lets others run.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

NARROW = 1024  # numbers of a hidden state, up to which an operator is shorter than a wait for threads
_PERIOD_S = 0.5  # between two looks at the system
_LOST, _FREE = 0.25, 0.5  # cores that this process waits for, or that idle, before another number is tried
_BLOCK, _BLOCKS = 4, 12  # calls with one number of threads at a time, and such blocks of a trial
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GAIN = 1.03  # how much faster another number must be
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 60.0  # after a trial that changed nothing; it doubles


@contextmanager
def on_one_thread(*, wanted: bool = True) -> Iterator[None]:
    """Compute in the block without other threads, if wanted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def few_threads(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Compute in the block on one thread if the model is narrow: other processes that start need the cores."""
    return on_one_thread(wanted=getattr(model.config.get_text_config(), "hidden_size", math.inf) <= NARROW)


class CoreTimes(NamedTuple):
    """Times since the start of the process and the machine, in seconds."""

    waited_s: float  # for a core, all threads of this process together
    idle_s: float  # of all cores together that it may use


def read_core_times() -> CoreTimes | None:
    """Return the times as Linux counts them; None if it does not (proc(5), "schedstat" and "stat")."""
    try:
        threads = [path.read_text(encoding="ascii") for path in Path("/proc/self/task").glob("*/schedstat")]
        cores = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    idle = sum(int(fields[4]) for fields in cores if fields[0] in own)
    return CoreTimes(sum(int(text.split()[1]) for text in threads) / 1e9, idle / _TICKS_PER_S) if threads else None


class ThreadChoice:
    """Chooses between numbers of threads by the clock. For one thread."""

    def __init__(
        self,
        most: int,
        *,
        read: Callable[[], CoreTimes | None] = read_core_times,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.threads = most  # of the next call
        self._most, self._read, self._clock = most, read, clock
        self._looked_s, self._times = clock(), read()
        self._pause_s, self._paused_until_s = _FIRST_PAUSE_S, 0.0
        self._chosen = self._other = most  # the other is tried; the same: there is no trial
        self._calls = 0  # of the trial
        self._seconds: defaultdict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    @contextmanager
    def timing(self, tokens: int) -> Iterator[None]:
        """Use the chosen number of threads, and count a call over so many tokens."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        began_s = self._clock()
        yield
        self.note(tokens, self._clock() - began_s)

    def note(self, tokens: int, seconds: float) -> None:
        """Count a call over so many tokens, and choose the number of threads of the next."""
        if self._other != self._chosen:
            self._note_trial(tokens, seconds)
        elif self._clock() - self._looked_s >= _PERIOD_S:
            self._other = self._look()

    def _look(self) -> int:
        """Return the number of threads to try. It depends on what other processes have done since the last look."""
        before, self._times = self._times, self._read()
        now_s = self._clock()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        if before is None or self._times is None or now_s < self._paused_until_s:
            return self._chosen
        lost = (self._times.waited_s - before.waited_s) / elapsed_s
        free = (self._times.idle_s - before.idle_s) / elapsed_s
        if lost > _LOST:
            return max(1, self._chosen - max(1, round(lost)))
        return min(self._most, self._chosen + max(1, int(free))) if free > _FREE else self._chosen

    def _note_trial(self, tokens: int, seconds: float) -> None:
        """Count a call of a trial, which alternates, so that both numbers see the same disturbances."""
        self._seconds[tokens].setdefault(self.threads, []).append(seconds)
        self._calls += 1
        if self._calls == _BLOCK * _BLOCKS:
            self._end_trial()
        self.threads = (self._chosen, self._other)[self._calls // _BLOCK % 2]

    def _end_trial(self) -> None:
        """Choose the faster number. Pause if it is the same as before."""
        if self._speed_of_other() > _GAIN:
            self._chosen, self._pause_s = self._other, _FIRST_PAUSE_S
        else:
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        self._looked_s, self._times = self._clock(), self._read()
        self._paused_until_s = self._looked_s + self._pause_s
        self._other, self._calls = self._chosen, 0
        self._seconds.clear()

    def _speed_of_other(self) -> float:
        """Return how many times as fast the other number was, over calls of the same numbers of tokens."""
        both = [seconds for seconds in self._seconds.values() if len(seconds) == 2]
        weights = [min(map(len, seconds.values())) for seconds in both]
        ratios = [math.log(median(seconds[self._chosen]) / median(seconds[self._other])) for seconds in both]
        if not both:
            return 1.0
        return math.exp(sum(w * ratio for w, ratio in zip(weights, ratios, strict=True)) / sum(weights))
