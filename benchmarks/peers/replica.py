"""A loop as in actors/replica/replica.py, with a fixed draft length if wanted, and with steps that can be timed."""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal

from transformers.utils import logging

from actors.loops.options import LoopOptions
from actors.loops.thread import LoopThread, LoopTimes
from actors.replica.roles import Role as ReplicaRole
from actors.replica.roles import make_loop
from actors.wire.link import LocalLink
from benchmarks.processes import Child
from engine.loading.checkpoint import ModelSpec
from engine.model.cuda import use_own_stream
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

if TYPE_CHECKING:
    from actors.wire.zmq_link import ReplicaZmqLink  # needs ZeroMQ, which a GPU machine may lack

Role = Literal["target", "adaptive-target", "drafter", "both"]
MakeRunner = Callable[[], Runner]
Sweep = dict[int, float]  # seconds of a step, by tokens per row
_CACHED = 160  # tokens before the timed ones: about the middle of an answer
_ROUNDS = 3  # per call; a comparison calls once per repetition
_MAX_CALL_S = 300.0
_WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step on an otherwise idle machine, with the threads that the model has in the comparison."""

    plain: Sweep  # a target with all threads; t_1 is plain[1]
    target: Sweep  # a target whose drafter is disaggregated
    draft_step_s: float  # t_draft


class MeasuredReplica:
    """A model's loop in its own thread. A "target" always verifies γ tokens; an adaptive one chooses the length."""

    def __init__(
        self,
        role: Role,
        link: "LocalLink | ReplicaZmqLink",
        make_runner: MakeRunner,
        make_colocated: MakeRunner | None = None,
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
        future: Future[Sweep] = Future()

        def call() -> None:
            try:
                future.set_result(_time_steps(self._runner, rows, sizes))
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
        colocated = None if self._make_colocated is None else self._make_colocated()
        role: ReplicaRole = "target" if self._role == "adaptive-target" else self._role
        options = LoopOptions(adaptive=self._role != "target", colocated=colocated)
        self._loop = make_loop(role, self._runner, self.link, options)

    def _turn(self) -> None:
        self._loop.turn()
        while not self._calls.empty():
            self._calls.get()()


def replica_process(role: Role, spec: ModelSpec, colocated: ModelSpec | None = None) -> Child[MeasuredReplica]:
    """Start a process with a replica on a ZeroMQ link. colocated: a drafter in the target's process."""
    assert spec.threads is not None
    return Child(partial(_open, role, spec, colocated), threads=spec.threads)


def _open(role: Role, spec: ModelSpec, colocated: ModelSpec | None) -> MeasuredReplica:
    from actors.wire.zmq_link import ReplicaZmqLink
    from engine.loading.runners import load_runner

    logging.disable_progress_bar()
    link = ReplicaZmqLink(spec.name, "127.0.0.1")
    make_colocated = None if colocated is None else partial(load_runner, colocated)
    return MeasuredReplica(role, link, partial(load_runner, spec), make_colocated)


def _time_steps(runner: Runner, rows: int, sizes: Sequence[int]) -> Sweep:
    """Return median seconds of a step with greedy sampling. Overwrites the first slots."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for slot in range(rows):
        runner.logits([RowInput(slot=slot, start=0, tokens=[1] * _CACHED)])
    for _ in range(_WARM_UP + _ROUNDS):
        for size in sizes:
            began_s = time.perf_counter()
            inputs = [RowInput(slot, _CACHED, [1] * size, settled=_CACHED) for slot in range(rows)]
            runner.logits(inputs).argmax(dim=-1).tolist()
            seconds[size].append(time.perf_counter() - began_s)
    return {size: median(times[_WARM_UP:]) for size, times in seconds.items()}
