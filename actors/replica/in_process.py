"""All of Consort in one process, without Ray or HTTP: target, drafter and coordinator threads on local links.

For libraries, tests, benchmarks, and a drafter that shares its target's GPU.
"""

import math
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Condition

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.loops.thread import LoopThread
from actors.replica.roles import Loop, Role, make_loop
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import ReplicaAddress
from engine.model.cuda import use_own_stream
from engine.model.runner import Runner

_CHECK_PERIOD_S = 1.0
_READY_S = 0.01


class Engine:
    """Start with `with Engine({...}) as engine:`; the threads end with the block."""

    def __init__(
        self,
        replicas: Mapping[str, tuple[Role, Runner]],
        options: LoopOptions = LoopOptions(),
        *,
        own_options: Mapping[str, LoopOptions] | None = None,
        wrap_link: Callable[[LocalLink], LocalLink] = lambda link: link,
    ) -> None:
        """
        replicas: by the name of their model; further ones of a model as `model#1`, `model#2`, …
        options: for all replicas.
        own_options: in place of `options`, by the replica's name.
        wrap_link: lets tests put faulty links under the coordinator and the replicas.
        """
        exchange = LocalExchange()
        link = wrap_link(exchange.join("coordinator"))
        own_options = own_options or {}
        all_options = {name: own_options.get(name, options) for name in replicas}
        replaceable = {name.partition("#")[0] for name, each in all_options.items() if each.weights is not None}
        self.coordinator = Coordinator(link, max_requests=sys.maxsize, max_silence_s=math.inf, replaceable=replaceable)
        self.loops: dict[str, Loop] = {}
        self._threads = [LoopThread("coordinator", self.coordinator.turn, link.wake)]
        links: list[LocalLink] = []
        self.turnstile = Turnstile(lambda: _wake_all(links))
        for name, (role, runner) in replicas.items():
            replica_link = wrap_link(exchange.join(name))
            links.append(replica_link)
            with ThreadPoolExecutor(1) as making:  # it runs the model: as in `LoopThread`, but the thread ends
                self.loops[name] = making.submit(make_loop, role, runner, replica_link, all_options[name]).result()
            prepare = partial(use_own_stream, runner.device)
            weights = all_options[name].weights
            if weights is not None:
                weights.alone = self.turnstile.alone_in_turn
            self._threads.append(LoopThread(name, partial(self._turn, name), replica_link.wake, prepare))
        self._alive = set(replicas)
        self._set_replicas()

    def __enter__(self) -> "Engine":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.stop()

    def _turn(self, name: str) -> None:
        with self.turnstile.turn():
            self.loops[name].turn()

    def lose(self, name: str) -> None:
        self._alive.remove(name)
        self._set_replicas()

    def _set_replicas(self) -> None:
        self.coordinator.set_replicas(ReplicaAddress(name, name.partition("#")[0]) for name in self._alive)

    def check(self) -> None:
        """Raise UnavailableError if a loop has ended. Slow ones are waited for: no other process could take over."""
        for thread in self._threads:
            thread.check(max_silence_s=math.inf)

    def wait_until_ready(self) -> None:
        """Wait until the coordinator, which discovers them in its own thread, knows all models. Raises as `check`."""
        while not {name.partition("#")[0] for name in self.loops} <= self.coordinator.models():
            self.check()
            time.sleep(_READY_S)

    def stream(self, request: Request) -> Iterator[Delta]:
        """Run `stream` on this engine's coordinator."""
        return stream(self.coordinator, request, self.check)

    def generate(self, requests: Sequence[Request]) -> list[list[Delta]]:
        """Run `generate` on this engine's coordinator."""
        return generate(self.coordinator, requests, self.check)


def _wake_all(links: Iterable[LocalLink]) -> None:
    for link in links:
        link.wake()


def stream(coordinator: Coordinator, request: Request, check: Callable[[], None]) -> Iterator[Delta]:
    """Yield the deltas of a request as they are committed. Closing the iterator cancels the request.

    check: called after every second without a delta; raises if waiting is pointless.

    Raises ConsortError if the request was refused or failed.
    """
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    coordinator.submit(request, deltas.put)
    try:
        yield from _until_finished(deltas, check)
    finally:
        coordinator.cancel(request.request_id, deltas.put)


def generate(coordinator: Coordinator, requests: Sequence[Request], check: Callable[[], None]) -> list[list[Delta]]:
    """Run several requests at the same time. Return the deltas of each, in their order. check: as in `stream`.

    Raises ConsortError if a request was refused or failed.
    """
    queues: list[queue.SimpleQueue[Delta]] = [queue.SimpleQueue() for _ in requests]
    try:
        for request, deltas in zip(requests, queues, strict=True):
            coordinator.submit(request, deltas.put)
        return [_after_restart(_until_finished(deltas, check)) for deltas in queues]
    finally:
        for request, deltas in zip(requests, queues, strict=True):
            coordinator.cancel(request.request_id, deltas.put)


def _after_restart(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas that were not taken back."""
    kept: list[Delta] = []
    for delta in deltas:
        kept.append(delta)
        if delta.restarts:
            kept.clear()
    return kept


def _until_finished(deltas: queue.SimpleQueue[Delta], check: Callable[[], None]) -> Iterator[Delta]:
    while True:
        try:
            delta = deltas.get(timeout=_CHECK_PERIOD_S)
        except queue.Empty:
            check()
            continue
        if delta.error is not None:
            raise delta.error
        yield delta
        if delta.finish is not None:
            return


class Turnstile:
    """Any number of turns at once, or something alone.

    transformers sets torch's default dtype for all threads while it makes a model: steps of others would compute in it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: makes turns that wait for messages return early."""
        self._wake = wake
        self._changed = Condition()
        self._turns = self._waiting = 0  # turns that run; what waits to be alone
        self._is_closed = False  # whether something is alone

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run the block beside other turns."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block, which is no part of a turn, when no turn runs."""
        with self._changed:
            self._waiting += 1
            self._wake()
            self._changed.wait_for(lambda: not self._is_closed and not self._turns)
            self._waiting -= 1
            self._is_closed = True
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()

    @contextmanager
    def alone_in_turn(self) -> Iterator[None]:
        """Run the block, which is a part of a turn, when no other turn runs."""
        self._leave()
        try:
            with self.alone():
                yield
        finally:
            self._enter()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed and not self._waiting)
            self._turns += 1

    def _leave(self) -> None:
        with self._changed:
            self._turns -= 1
            self._changed.notify_all()
