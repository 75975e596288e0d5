"""Decides when a request may begin: bounded, fair between API keys, by priority within a key, before its deadline.

Requests wait here and not at the models, so that one client's backlog can't hold up another's. Between keys it is
start-time fair queueing (Goyal, Vin, Cheng 1996) of tokens by weight. One event loop uses it; it knows no HTTP.
"""

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from actors.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError, OverloadedError
from deployments.configuration.config import ModelConfig, ServerConfig
from deployments.http.keys import ANYBODY, ApiKey
from deployments.http.load import Load

_MOST_SLOTS = 64  # of a replica whose slots are `auto`
_READY = 2  # requests beyond the slots, so that none stays empty while the next one is fetched
_LEAST_BOUND = 256  # of requests at hand, where nothing is configured

Sink = Callable[[Delta], None]


class Backend(Protocol):
    """What makes answers: the coordinator."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is taken on at once; what exceeds it is refused."""

    max_requests: int = 256  # in progress or waiting
    max_tokens: int | None = None  # of their prompts and answers together
    # By target, how many may be in progress, or more if its replicas have more slots; else: any.
    running: Mapping[str, int] = field(default_factory=dict)


def limits_of(config: ServerConfig) -> Limits:
    """As many requests in progress as the targets have slots, and a few that are ready when one gets free."""
    targets = {name: config.models[name] for endpoint in config.endpoints.values() for name in endpoint.models}
    running = {name: _slots(model) * model.replicas + _READY for name, model in targets.items()}
    most = sum(_slots(model) * _most_replicas(model) for model in targets.values())
    return Limits(config.http.max_requests or max(_LEAST_BOUND, 2 * most), config.http.max_tokens, running)


def _slots(model: ModelConfig) -> int:
    return _MOST_SLOTS if model.slots == "auto" else model.slots


def _most_replicas(model: ModelConfig) -> int:
    return max(model.replicas, 0 if model.scaling is None else model.scaling.max)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits or runs."""

    request: Request
    sink: Sink
    key: ApiKey
    arrived_s: float
    deadline: asyncio.TimerHandle | None = None
    running: bool = False

    @property
    def tokens(self) -> int:
        """The most that its slot will hold."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def target(self) -> str:
        return self.request.endpoint.target


class Admission:
    """The queue in front of the coordinator."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        began: Callable[[Request, float], None] = lambda request, waited_s: None,
        slots: Callable[[str], int] = lambda target: 0,
    ) -> None:
        """
        began: is told of each request that begins, and how many seconds it waited.
        slots: how many the live replicas of a target have together, as far as is known.
        """
        self._backend, self._limits, self._began, self._slots = backend, limits, began, slots
        self._tickets: dict[int, Ticket] = {}
        self._queues: dict[str, dict[ApiKey, list[tuple[int, int, Ticket]]]] = {}  # by target
        self._served: dict[ApiKey, float] = {}  # tokens by weight: virtual time
        self._running: dict[str, int] = {}
        self._held = Counter[ApiKey]()
        self._order = count()
        self._load = Load()

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Requests that wait, and requests that have begun, by endpoint."""
        waiting, running = Counter[str](), Counter[str]()
        for ticket in self._tickets.values():
            (running if ticket.running else waiting)[ticket.request.endpoint.name] += 1
        return waiting, running

    def check_room(self, key: ApiKey = ANYBODY) -> None:
        """Raises OverloadedError if the server, or the key, has as many requests as it may have."""
        own = sum(ticket.key == key for ticket in self._tickets.values()) if key.max_requests is not None else 0
        own += self._held[key]
        for taken, most, whose in (
            (len(self._tickets) + self._held.total(), self._limits.max_requests, "in progress"),
            (own, key.max_requests, "of this API key in progress"),
        ):
            if most is not None and taken >= most:
                self._refuse(f"{most} requests are {whose} already.")

    @contextmanager
    def hold(self, key: ApiKey) -> Iterator[None]:
        """Counts as a request in progress while work is done for one that needs no model; raises as `check_room`."""
        self.check_room(key)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1

    def submit(self, request: Request, sink: Sink, *, key: ApiKey = ANYBODY, priority: int = 0) -> None:
        """Begin a request now or later. `sink` gets its deltas, from any thread, and must not block.

        Args:
            priority: among the requests of one key, lower ones begin first.

        Raises:
            OverloadedError: the server, or the key, has all that it may have.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, sink, key, loop.time())
        self._check_limits(ticket)
        if request.timeout_s is not None:
            ticket.deadline = loop.call_later(request.timeout_s, self._expire, request.request_id)
        self._tickets[request.request_id] = ticket
        queues = self._queues.setdefault(ticket.target, {})
        if not queues.get(key):  # a key that was idle has saved up nothing
            busy = [self._served[other] for other, queue in queues.items() if queue]
            self._served[key] = max(self._served.get(key, 0.0), min(busy, default=self._least_served(key)))
        heapq.heappush(queues.setdefault(key, []), (priority, next(self._order), ticket))
        self._begin_next(ticket.target)

    def cancel(self, request_id: int) -> None:
        """End a request without another delta; unknown and ended ids are ignored."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.running:
            self._backend.cancel(request_id)
        self._forget(request_id)

    def finished(self, request_id: int) -> None:
        """To be called in the event loop when a request's last delta is there."""
        self._load.ended(asyncio.get_running_loop().time())
        self._forget(request_id)

    def _check_limits(self, ticket: Ticket) -> None:
        self.check_room(ticket.key)
        own = [other for other in self._tickets.values() if other.key == ticket.key]
        for tickets, tokens, whose in (
            (list(self._tickets.values()), self._limits.max_tokens, "in progress"),
            (own, ticket.key.max_tokens, "of this API key in progress"),
        ):
            if tokens is not None and sum(other.tokens for other in tickets) + ticket.tokens > tokens:
                self._refuse(f"with {ticket.tokens} more, the tokens {whose} would exceed {tokens}.")

    def _refuse(self, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        raise OverloadedError(reason, retry_after_s=self._load.retry_after_s(now_s, len(self._tickets)))

    def _begin_next(self, target: str) -> None:
        """Begin what the target has room for: of the key that was served least, what is most urgent."""
        slots = self._slots(target)
        limit = max(self._limits.running.get(target, math.inf), slots + _READY if slots else 0)
        queues = self._queues.get(target, {})
        while self._running.get(target, 0) < limit and (waiting := [key for key, queue in queues.items() if queue]):
            key = min(waiting, key=lambda key: self._served[key])
            _, _, ticket = heapq.heappop(queues[key])
            if not queues[key]:
                del queues[key]
            if self._tickets.get(ticket.request.request_id) is ticket:  # or else it was cancelled meanwhile
                self._served[key] += ticket.tokens / key.weight
                self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        ticket.running = True
        self._running[ticket.target] = self._running.get(ticket.target, 0) + 1
        request = ticket.request
        waited_s = asyncio.get_running_loop().time() - ticket.arrived_s
        self._began(request, waited_s)
        if ticket.deadline is not None and request.timeout_s is not None:
            ticket.deadline.cancel()
            request = replace(request, timeout_s=max(request.timeout_s - waited_s, 0.001))
        try:
            self._backend.submit(request, ticket.sink)
        except ConsortError as error:
            ticket.sink(Delta("", (), Statistics(), error=error))

    def _expire(self, request_id: int) -> None:
        """A request has waited past its deadline."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and not ticket.running:
            reason = f"timeout_s: the request waited for {ticket.request.timeout_s:g} s without beginning"
            ticket.sink(Delta("", (), Statistics(), error=DeadlineError(reason)))

    def _forget(self, request_id: int) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        if ticket.running:
            self._running[ticket.target] -= 1
            self._begin_next(ticket.target)

    def _least_served(self, key: ApiKey) -> float:
        """Virtual time where nobody waits: that of whoever is busy."""
        busy = {ticket.key for ticket in self._tickets.values()} - {key}
        return min((self._served[other] for other in busy if other in self._served), default=0.0)
