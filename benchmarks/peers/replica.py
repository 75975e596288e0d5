"""A target or drafter loop as in actors/replica/replica.py, with additions for measurements. Must not know its link.

Draft lengths can be fixed, and steps can be timed while the loop is idle.
"""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeVar

from actors.loops.options import LoopOptions
from actors.loops.thread import LoopThread, LoopTimes
from actors.replica.roles import Role as ReplicaRole
from actors.replica.roles import make_loop
from actors.wire.link import LocalLink
from engine.model.cuda import use_own_stream
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

if TYPE_CHECKING:
    from actors.wire.zmq_link import ReplicaZmqLink  # needs ZeroMQ, which a GPU machine may lack

Role = Literal["target", "adaptive-target", "drafter", "both"]
T = TypeVar("T")
Sweep = dict[int, float]  # seconds of a step, by tokens per row
_CACHED = 160  # tokens before the timed ones: about the middle of an answer
_ROUNDS = 3  # per call; a comparison calls once per repetition
_MAX_CALL_S = 300.0
_WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step on an otherwise idle machine, with the threads that the model has in the comparison."""

    plain: Sweep  # a target with all threads, by tokens per row; t_1 is plain[1]
    target: Sweep  # a target whose drafter is disaggregated, by tokens per row
    draft_step_s: float  # t_draft


class MeasuredReplica:
    """A model's loop in its own thread. A "target" always verifies γ tokens; an adaptive one chooses the length."""

    def __init__(
        self,
        role: Role,
        link: "LocalLink | ReplicaZmqLink",
        make_runner: Callable[[], Runner],
        make_colocated: Callable[[], Runner] | None = None,
    ) -> None:
        """
        make_runner: called in the loop's thread.
        make_colocated: likewise, for a drafter colocated with the target.
        """
        self._role, self.link, self._make_runner, self._make_colocated = role, link, make_runner, make_colocated
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = LoopThread(link.name, self._turn, link.wake, prepare=self._load)
        self._thread.start()
        self._last_times = self._loop.times - self._loop.times

    def take_times(self) -> LoopTimes:
        """Return the loop's times since the last call."""
        now = replace(self._loop.times)
        difference, self._last_times = now - self._last_times, now
        return difference

    def clear_cache(self) -> None:
        """Forget cached prompts, so that no contestant profits from another. The loop must have no requests."""
        self._runner.cache.allocator.forget_unheld()

    def check(self) -> None:
        """Raise UnavailableError if the loop has ended or is stuck."""
        self._thread.check()

    def sweep(self, *, rows: int, sizes: Sequence[int]) -> Sweep:
        """Time steps of `rows` rows for each number of tokens per row. The loop must have no requests."""
        return self._in_loop(partial(time_steps, self._runner, rows=rows, sizes=sizes))

    def restart(self) -> None:
        """Begin again with a loop that has learned nothing. The loop must have no requests."""
        self._in_loop(self._begin)
        self._last_times = self._loop.times - self._loop.times

    def _in_loop(self, work: Callable[[], T]) -> T:
        """Return the result of a call in the loop's thread."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        self.link.wake()
        return future.result(_MAX_CALL_S)

    def stop(self) -> None:
        """End the loop, and wait until it has ended."""
        self._thread.stop()
        self.link.close()

    def _load(self) -> None:
        self._runner = self._make_runner()
        use_own_stream(self._runner.device)
        self._colocated = None if self._make_colocated is None else self._make_colocated()
        self._begin()

    def _begin(self) -> None:
        options = LoopOptions(adaptive=self._role != "target", colocated=self._colocated)
        role: ReplicaRole = "target" if self._role == "adaptive-target" else self._role
        self._loop = make_loop(role, self._runner, self.link, options)

    def _turn(self) -> None:
        self._loop.turn()
        while not self._calls.empty():
            self._calls.get()()


def time_steps(runner: Runner, *, rows: int, sizes: Sequence[int]) -> Sweep:
    """Return median seconds of a step with greedy sampling, by tokens per row. Overwrites the first slots."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_WARM_UP + _ROUNDS):
        for size in sizes:
            began_s = time.perf_counter()
            inputs = [RowInput(slot=slot, start=_CACHED, tokens=[1] * size) for slot in range(rows)]
            runner.logits(inputs).argmax(dim=-1).tolist()
            seconds[size].append(time.perf_counter() - began_s)
    return {size: median(times[_WARM_UP:]) for size, times in seconds.items()}
