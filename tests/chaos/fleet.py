"""Supervised replicas in child processes, and a coordinator in this process that works with them.

A fast stand-in for Ray Serve: a dead process is replaced at once, one that does not answer is killed after a while, and
`deployments.replicas.discovery` asks the replicas for their addresses.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec.structs import replace
from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.loops.thread import LoopThread
from actors.replica.replica import Replica, ReplicaSpec
from actors.replica.roles import Role
from actors.wire.messages import ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink
from decoding.errors import UnavailableError
from engine.loading.checkpoint import ModelSpec
from engine.loading.host import compute_environment
from tests.chaos.proxy import Relay, Relays

if TYPE_CHECKING:  # it imports Ray, whose environment `python -m tests.chaos serve` sets first
    from deployments.replicas.discovery import ReplicaAddresses

_ASK_S = 3.0  # time for a replica to return its address, as in deployments/replicas/discovery.py
_GIVEN_UP_S = 12.0  # time without an answer after which a process is killed
_POLL_S = 0.02
_START_S = 60.0


class SupervisedReplica:
    """A replica whose process is replaced when it dies."""

    def __init__(self, context: ForkServerContext, relays: Relays, role: Role, spec: ModelSpec) -> None:
        self.role, self.spec = role, spec
        self.restarts = 0
        self._context, self._relays = context, relays
        self._asking = threading.Lock()
        self._process: ForkServerProcess | None = None
        self._connection: Connection | None = None
        self._address: ReplicaAddress | None = None
        self._relay: Relay | None = None
        self._answered_s = 0.0

    @property
    def name(self) -> str | None:
        """Name of the replica; None while it starts."""
        return None if self._address is None else self._address.name

    @property
    def relay(self) -> Relay:
        """The relay through which its messages pass."""
        assert self._relay is not None
        return self._relay

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Start a process. Does not wait for it."""
        self._connection, child_end = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self.role, self.spec, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self._address = None
        self._answered_s = time.monotonic() + _START_S  # time to load

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is alive."""
        assert self._process is not None
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it ended, and another thread has just noticed
                os.kill(self._process.pid, number)

    def supervise(self) -> None:
        """Replace the process if it has died. Kill it if it has not answered for long."""
        assert self._process is not None
        if not self._process.is_alive():
            with self._asking:
                self._close()
                self.start()
            self.restarts += 1
        elif time.monotonic() - self._answered_s > _GIVEN_UP_S:
            self.signal(signal.SIGKILL)

    def ask_address(self) -> ReplicaAddress | None:
        """Return the replica's address behind its relay; None if it does not answer or is unhealthy."""
        with self._asking, contextlib.suppress(OSError, EOFError):
            connection = self._connection
            if connection is None:
                return None
            connection.send(None)
            end_s = time.monotonic() + _ASK_S
            answer: ReplicaAddress | None = None
            while answer is None and connection.poll(max(0.0, end_s - time.monotonic())):
                answer = connection.recv()
            while connection.poll(0):  # late answers to earlier questions
                answer = connection.recv()
            if answer is not None:
                self._answered_s = time.monotonic()
                return self._through_relay(answer)
        return None

    def stop(self) -> None:
        """End the process without a replacement."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.join()
        self._process.close()
        self._close()

    def _through_relay(self, address: ReplicaAddress) -> ReplicaAddress:
        if self._address is None or self._address.name != address.name:
            self._relay = self._relays.open(urlsplit(address.uri).port or 0)
            self._address = replace(address, uri=f"tcp://127.0.0.1:{self._relay.port}")
        return self._address

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._relay is not None:
            self._relays.close(self._relay)
            self._relay = None
        self._address = None


class Fleet:
    """All replicas with their supervisor, discovery and coordinator."""

    def __init__(self, replicas: Sequence[SupervisedReplica], coordinator: Coordinator, thread: LoopThread) -> None:
        """thread: the coordinator's."""
        self.replicas, self.coordinator = replicas, coordinator
        self.ending = threading.Event()
        self._thread = thread
        self._asking = ThreadPoolExecutor(len(replicas), thread_name_prefix="asking")

    def check(self) -> None:
        """Raise UnavailableError if the coordinator's loop has ended."""
        self._thread.check()

    def ready(self, role: Role) -> list[SupervisedReplica]:
        """Return the ready replicas of a role."""
        return [replica for replica in self.replicas if replica.role == role and replica.name is not None]

    async def supervise(self) -> None:
        """Replace dead replicas and keep the coordinator informed, until `ending`."""
        models = {replica.spec.name for replica in self.replicas}
        from deployments.replicas.discovery import Discovery

        discovery = Discovery({model: partial(self._ask, model) for model in models}, self.coordinator.set_replicas)
        discovering = asyncio.create_task(discovery.run())
        try:
            while not self.ending.is_set():
                await asyncio.sleep(_POLL_S)
                for replica in self.replicas:
                    replica.supervise()
        finally:
            discovering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await discovering
            self._asking.shutdown()

    async def _ask(self, model: str) -> "ReplicaAddresses":
        loop = asyncio.get_running_loop()
        replicas = [replica for replica in self.replicas if replica.spec.name == model]
        answers = await asyncio.gather(
            *(loop.run_in_executor(self._asking, replica.ask_address) for replica in replicas)
        )
        addresses = [address for address in answers if address is not None]
        if not addresses:
            raise UnavailableError(f"no replica of {model} is up")
        from deployments.replicas.discovery import ReplicaAddresses

        return ReplicaAddresses(addresses)


@contextlib.contextmanager
def running_fleet(models: Mapping[str, tuple[Role, ModelSpec, int]]) -> Iterator[Fleet]:
    """Start a fleet and wait until it is ready. models: role, specification and number of replicas, by model."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.fleet", "transformers.models.llama.modeling_llama"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment())
        relays = stack.enter_context(Relays())
        replicas = [
            SupervisedReplica(context, relays, role, spec)
            for role, spec, count in models.values()
            for _ in range(count)
        ]
        link = ConnectingZmqLink("chaos")
        stack.callback(link.close)
        coordinator = Coordinator(link)
        thread = LoopThread("coordinator", coordinator.turn, link.wake)
        thread.start()
        stack.callback(thread.stop)
        fleet = Fleet(replicas, coordinator, thread)
        for replica in replicas:
            stack.callback(replica.stop)
            replica.start()
        with _in_thread(fleet):
            _wait_until_up(fleet)
            yield fleet


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the environment that replicas inherit before they import torch."""
    saved = dict(os.environ)
    os.environ |= compute_environment(1)
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # killed processes do not clean up
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def _in_thread(fleet: Fleet) -> Iterator[None]:
    """Supervise in an event loop of its own thread."""
    thread = threading.Thread(target=lambda: asyncio.run(fleet.supervise()), name="supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        fleet.ending.set()
        thread.join()


def _wait_until_up(fleet: Fleet) -> None:
    end_s = time.monotonic() + _START_S
    while any(replica.name is None for replica in fleet.replicas):
        if time.monotonic() > end_s:
            raise UnavailableError("the replicas did not come up")
        time.sleep(_POLL_S)


def _serve(role: Role, spec: ModelSpec, connection: Connection) -> None:
    """Run a replica's process: load, then answer with the address while the loop is healthy, else with None."""
    logging.disable_progress_bar()
    replica = Replica(ReplicaSpec(role=role, model=spec), "127.0.0.1")
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        try:
            replica.check()
        except UnavailableError:
            connection.send(None)
        else:
            connection.send(replica.address)
