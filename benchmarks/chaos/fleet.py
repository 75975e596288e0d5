"""Replicas in processes of their own that die and are started again, and the coordinator here that works with them.

What Serve does on a cluster is done here in a fraction of the time: a dead process is replaced at once, one that does
not answer is given up after a while, and `deployments.discovery` asks all of them where they are.
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
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from urllib.parse import urlsplit

from transformers.utils import logging

from actors.coordinator.loop import Coordinator
from actors.loading.checkpoint import ModelSpec
from actors.loops.thread import LoopThread
from actors.model.thread_environment import compute_environment
from actors.replica.replica import Replica, Role
from actors.wire.addresses import ReplicaAddress
from actors.wire.zmq_link import ConnectingZmqLink
from benchmarks.chaos.proxy import Relay, Relays
from decoding.errors import UnavailableError
from deployments.discovery import Discovery, ReplicaAddresses

_ASK_S = 3.0  # how long a replica may take to say where it is, as in deployments/app.py
_GIVEN_UP_S = 12.0  # without an answer, before a process that runs is killed
_POLL_S = 0.02
_START_S = 60.0


class Post:
    """A replica's place: a process, after its death another one."""

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
        """Of the replica that is up; None: it is starting."""
        return None if self._address is None else self._address.name

    @property
    def relay(self) -> Relay:
        """What its messages pass through."""
        assert self._relay is not None
        return self._relay

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Start a process; returns at once."""
        self._connection, child_end = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self.role, self.spec, child_end), daemon=True)
        self._process.start()
        child_end.close()
        self._address = None
        self._answered_s = time.monotonic() + _START_S  # so long it may take to load

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there."""
        assert self._process is not None
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def look_after(self) -> None:
        """Replace the process if it has died, kill it if it has not answered for long."""
        assert self._process is not None
        if not self._process.is_alive():
            with self._asking:
                self._close()
                self.start()
            self.restarts += 1
        elif time.monotonic() - self._answered_s > _GIVEN_UP_S:
            self.signal(signal.SIGKILL)

    def ask(self) -> ReplicaAddress | None:
        """Where the replica is, as its coordinators should see it; None: it does not answer, or is not well."""
        with self._asking, contextlib.suppress(OSError, EOFError):
            connection = self._connection
            if connection is None:
                return None
            connection.send(None)
            end_s = time.monotonic() + _ASK_S
            answer: ReplicaAddress | None = None
            while answer is None and connection.poll(max(0.0, end_s - time.monotonic())):
                answer = connection.recv()
            while connection.poll(0):  # of earlier questions, that came late
                answer = connection.recv()
            if answer is not None:
                self._answered_s = time.monotonic()
                return self._through_relay(answer)
        return None

    def stop(self) -> None:
        """End the process for good."""
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
    """All posts, a supervisor that looks after them, discovery, and a coordinator."""

    def __init__(self, posts: Sequence[Post], coordinator: Coordinator, thread: LoopThread) -> None:
        """thread: the coordinator's."""
        self.posts, self.coordinator = posts, coordinator
        self.ending = threading.Event()
        self._thread = thread
        self._asking = ThreadPoolExecutor(len(posts), thread_name_prefix="asking")

    def check(self) -> None:
        """Raises UnavailableError if the coordinator's loop has ended."""
        self._thread.check()

    def of(self, role: Role) -> list[Post]:
        """The posts of a role whose replicas are up."""
        return [post for post in self.posts if post.role == role and post.name is not None]

    async def supervise(self) -> None:
        """Keep the posts manned and the coordinator informed, until `ending`."""
        models = {post.spec.name for post in self.posts}
        discovery = Discovery({model: partial(self._ask, model) for model in models}, self.coordinator.set_replicas)
        finding = asyncio.create_task(discovery.run())
        try:
            while not self.ending.is_set():
                await asyncio.sleep(_POLL_S)
                for post in self.posts:
                    post.look_after()
        finally:
            finding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await finding
            self._asking.shutdown()

    async def _ask(self, model: str) -> ReplicaAddresses:
        loop = asyncio.get_running_loop()
        posts = [post for post in self.posts if post.spec.name == model]
        answers = await asyncio.gather(*(loop.run_in_executor(self._asking, post.ask) for post in posts))
        found = [answer for answer in answers if answer is not None]
        if not found:
            raise UnavailableError(f"no replica of {model} is up")
        return ReplicaAddresses(found)


@contextlib.contextmanager
def running_fleet(models: Mapping[str, tuple[Role, ModelSpec, int]]) -> Iterator[Fleet]:
    """A fleet that is up. models: role, what to load, and how many replicas, by model."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.chaos.fleet", "transformers.models.llama.modeling_llama"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment())
        relays = stack.enter_context(Relays())
        posts = [Post(context, relays, role, spec) for role, spec, count in models.values() for _ in range(count)]
        link = ConnectingZmqLink("chaos")
        stack.callback(link.close)
        coordinator = Coordinator(link)
        thread = LoopThread("coordinator", coordinator.turn, link.wake)
        thread.start()
        stack.callback(thread.stop)
        fleet = Fleet(posts, coordinator, thread)
        for post in posts:
            stack.callback(post.stop)
            post.start()
        with _in_thread(fleet):
            _wait_until_up(fleet)
            yield fleet


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What replicas inherit, before they compute."""
    saved = dict(os.environ)
    os.environ |= compute_environment(1)
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # what is killed cleans nothing up
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def _in_thread(fleet: Fleet) -> Iterator[None]:
    """Supervision, in an event loop of its own."""
    thread = threading.Thread(target=lambda: asyncio.run(fleet.supervise()), name="supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        fleet.ending.set()
        thread.join()


def _wait_until_up(fleet: Fleet) -> None:
    end_s = time.monotonic() + _START_S
    while any(post.name is None for post in fleet.posts):
        if time.monotonic() > end_s:
            raise UnavailableError("the replicas did not come up")
        time.sleep(_POLL_S)


def _serve(role: Role, spec: ModelSpec, connection: Connection) -> None:
    """A replica's process: load, then answer where it is for as long as its loop is healthy."""
    logging.disable_progress_bar()
    replica = Replica(role, spec, "127.0.0.1")
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
