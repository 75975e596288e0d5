"""A target or drafter loop as in actors/replica/replica.py, with two things that only measuring needs.

Its draft lengths can be fixed, and its steps can be timed while it is idle. It does not know what its link is made of.
"""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

from actors.drafter.loop import Drafter
from actors.loops.thread import LoopThread, LoopTimes
from actors.model.cuda_streams import use_own_stream
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.replica.shared_weights import Loop, SharedWeightsLoop
from actors.target.colocated_drafter import ColocatedDrafter
from actors.target.loop import Target
from actors.wire.link import ConnectingLink

Role = Literal["target", "adaptive-target", "drafter", "both"]
Sweep = dict[int, float]  # seconds of a step, by tokens per row
_CACHED = 160  # tokens before the timed ones, about the middle of an answer
_ROUNDS = 3  # of one call; a comparison calls once per repetition
_MAX_SWEEP_S = 300.0
_WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step, alone on the machine, each with the threads that its model has in the comparison."""

    plain: Sweep  # of a target with all threads, by tokens per row; t_1 is at 1
    target: Sweep  # of a target with a drafter beside it, by tokens per row
    draft_step_s: float  # t_draft


class MeasuredReplica:
    """A model's loop in a thread of its own. A "target" always verifies γ draft tokens, an adaptive one what pays."""

    def __init__(
        self,
        role: Role,
        link: ConnectingLink,
        make_runner: Callable[[], Runner],
        make_inside: Callable[[], Runner] | None = None,
    ) -> None:
        """
        make_runner: called in the loop's thread.
        make_inside: likewise, of a target with a drafter inside.
        """
        self._role, self.link, self._make_runner, self._make_inside = role, link, make_runner, make_inside
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = LoopThread(link.name, self._turn, link.wake, prepare=self._load)
        self._thread.start()
        self._seen = self._loop.times - self._loop.times

    def take_times(self) -> LoopTimes:
        """Where the loop's time went since the last call."""
        now = replace(self._loop.times)
        since, self._seen = now - self._seen, now
        return since

    def forget(self) -> None:
        """Let no contestant find prompts that another one has left in the slots. The loop must have no requests."""
        cache = self._runner.cache
        for slot in [cache.take()[0] for _ in range(cache.free)]:
            cache.give_back(slot)

    def check(self) -> None:
        """Raises UnavailableError if the loop has ended or is stuck."""
        self._thread.check()

    def sweep(self, *, rows: int, sizes: Sequence[int]) -> Sweep:
        """Time steps of so many rows and tokens per row, greedy sampling included. The loop must have no requests."""
        future: Future[Sweep] = Future()

        def work() -> None:
            try:
                future.set_result(time_steps(self._runner, rows=rows, sizes=sizes))
            except Exception as error:
                future.set_exception(error)

        self._calls.put(work)
        self.link.wake()
        return future.result(_MAX_SWEEP_S)

    def stop(self) -> None:
        """End the loop and wait for that."""
        self._thread.stop()
        self.link.close()

    def _load(self) -> None:
        self._runner = self._make_runner()
        use_own_stream(self._runner.device)
        self._loop: Loop
        if self._role == "drafter":
            self._loop = Drafter(self._runner, self.link)
        elif self._role == "both":
            make_drafter = partial(Drafter, self._runner.shared_copy())
            self._loop = SharedWeightsLoop(self.link, partial(Target, self._runner), make_drafter)
        else:
            drafter = None if self._make_inside is None else ColocatedDrafter(self._make_inside())
            adaptive = self._role == "adaptive-target"
            self._loop = Target(self._runner, self.link, adaptive=adaptive, colocated_drafter=drafter)

    def _turn(self) -> None:
        self._loop.turn()
        while not self._calls.empty():
            self._calls.get()()


def time_steps(runner: Runner, *, rows: int, sizes: Sequence[int]) -> Sweep:
    """The median over a few rounds, each of which goes through all sizes. Scribbles over the first slots."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_WARM_UP + _ROUNDS):
        for size in sizes:
            began_s = time.perf_counter()
            inputs = [RowInput(slot=slot, start=_CACHED, tokens=[1] * size) for slot in range(rows)]
            runner.logits(inputs).argmax(dim=-1).tolist()
            seconds[size].append(time.perf_counter() - began_s)
    return {size: median(times[_WARM_UP:]) for size, times in seconds.items()}
