"""Real runs to validate the simulator: a target, a drafter and a coordinator, each in a process of its own.

The drafter offers only chains, like the simulated one. Every process has one thread and its own core.
"""

import contextlib
import queue
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request
from actors.drafter.loop import Drafter
from actors.loops.thread import LoopThread, LoopTimes
from actors.replica.replica import load_runner
from actors.wire.zmq_link import ConnectingZmqLink, ReplicaZmqLink
from benchmarks.peers.hosts import Child
from benchmarks.peers.replica import MeasuredReplica, Role
from decoding.drafts.calibration import RankCalibration
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec

_Event = tuple[float, int, Delta]  # seconds, stream, delta


class _FirstOnly(RankCalibration):
    def probabilities(self, gap: float) -> list[float]:
        return super().probabilities(gap)[:1]


class ChainReplica(MeasuredReplica):
    """A loop as in actors/, but a drafter offers only chains."""

    def _load(self) -> None:
        super()._load()
        if isinstance(self._loop, Drafter):
            self._loop = Drafter(self._runner, self.link, alternatives=0)
            self._loop._calibrations = defaultdict(_FirstOnly)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One real run, measured while all streams were running."""

    streams: int
    draft_length: int
    new_tokens: int  # of each answer
    tokens_per_s: float
    acceptance: float  # probability that a draft token is accepted if those before it are
    drafted: float  # draft tokens per row and turn
    coordinator_cpu_per_1000_tokens_s: float  # of its thread
    seconds: float  # in which the loops' times were taken
    target: LoopTimes
    drafter: LoopTimes


class _TimedCoordinator:
    """Measures the CPU time of a coordinator's loop."""

    def __init__(self, link: ConnectingZmqLink) -> None:
        self.coordinator = Coordinator(link)
        self.cpu_s = 0.0

    def turn(self) -> None:
        began_s = time.thread_time()
        self.coordinator.turn()
        self.cpu_s += time.thread_time() - began_s


class Stage:
    """The running processes."""

    def __init__(self, timed: _TimedCoordinator, target: Child[ChainReplica], drafter: Child[ChainReplica]) -> None:
        self._timed, self._target, self._drafter = timed, target, drafter

    def run(self, prompts: Sequence[list[int]], *, draft_length: int, new_tokens: int) -> MeasuredRun:
        """Answer all prompts concurrently and greedily."""
        drafter = "drafter" if draft_length else None
        endpoint = Endpoint("bench", "target", drafter, draft_length, lambda tokens: "")
        params = SamplingParams(max_tokens=new_tokens, temperature=0)
        deltas: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        cpu_s = self._timed.cpu_s
        for stream, prompt in enumerate(prompts):
            self._timed.coordinator.submit(Request(endpoint, prompt, params), partial(_note, deltas, stream))
        events: list[_Event] = []
        while len({stream for _, stream, _ in events}) < len(prompts):
            events.append(_next(deltas))
        self._times()
        began_s = time.perf_counter()
        while all(delta.finish is None for _, _, delta in events):
            events.append(_next(deltas))
        target, drafting = self._times()  # while all streams ran
        seconds = time.perf_counter() - began_s
        while sum(delta.finish is not None for _, _, delta in events) < len(prompts):
            events.append(_next(deltas))
        cpu_s = self._timed.cpu_s - cpu_s
        last = [delta.statistics for _, _, delta in events if delta.finish is not None]
        accepted, missed = sum(stats.accepted for stats in last), sum(stats.missed for stats in last)
        return MeasuredRun(
            len(prompts),
            draft_length,
            new_tokens,
            _rate(events, len(prompts)),
            accepted / max(1, accepted + missed),
            sum(stats.drafted for stats in last) / (sum(stats.steps for stats in last) - len(last)),
            1e3 * cpu_s / sum(stats.committed for stats in last),
            seconds,
            target,
            drafting,
        )

    def _times(self) -> tuple[LoopTimes, LoopTimes]:
        target = self._target.call(MeasuredReplica.take_times)
        return target, self._drafter.call(MeasuredReplica.take_times)


def _note(deltas: "queue.SimpleQueue[_Event]", stream: int, delta: Delta) -> None:
    deltas.put((time.perf_counter(), stream, delta))


def _next(deltas: "queue.SimpleQueue[_Event]") -> _Event:
    events = deltas.get(timeout=120)
    if events[2].error is not None:
        raise events[2].error
    return events


def _rate(events: Sequence[_Event], streams: int) -> float:
    """Return tokens per second from the latest first delta of a stream to the earliest last delta."""
    first = [next(at_s for at_s, which, _ in events if which == stream) for stream in range(streams)]
    began_s = max(first)
    ended_s = min(at_s for at_s, _, delta in events if delta.finish is not None)
    tokens = sum(len(delta.tokens) for at_s, _, delta in events if began_s < at_s <= ended_s)
    return tokens / (ended_s - began_s)


@contextlib.contextmanager
def running(target: ModelSpec, drafter: ModelSpec) -> Iterator[Stage]:
    """Start both models in child processes, and a coordinator in this process."""
    with contextlib.ExitStack() as stack:
        children = [Child(partial(_open, role, spec), threads=1) for role, spec in _roles(target, drafter)]
        link = ConnectingZmqLink("bench")
        stack.callback(link.close)
        timed = _TimedCoordinator(link)
        addresses = [stack.enter_context(child).call(attrgetter("link.address")) for child in children]
        thread = LoopThread("coordinator", timed.turn, link.wake)
        thread.start()
        stack.callback(thread.stop)
        timed.coordinator.set_replicas(addresses)
        yield Stage(timed, *children)


def _roles(target: ModelSpec, drafter: ModelSpec) -> list[tuple[Role, ModelSpec]]:
    return [("target", replace(target, name="target")), ("drafter", replace(drafter, name="drafter"))]


def _open(role: Role, spec: ModelSpec) -> ChainReplica:
    logging.disable_progress_bar()
    link = ReplicaZmqLink(spec.name, "127.0.0.1")
    return ChainReplica(role, link, partial(load_runner, spec))
