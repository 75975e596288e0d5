"""Decides whether a request is taken on, and when it begins: bounded, fair between API keys, before its deadline.

Requests wait here and not at the models, so that one client's backlog can't hold up another's. How long one would wait
is predicted from what runs and waits before it. One event loop uses it; it knows no HTTP.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import Bound, ConsortError, DeadlineError, OverloadedError
from deployments.admission.fair_queue import FairQueue
from deployments.admission.load import Load
from deployments.admission.ticket import Sink, Ticket
from deployments.configuration.config import ServerConfig
from deployments.configuration.key_ring import ANYBODY, ApiKey
from deployments.configuration.model import ModelConfig

_MOST_SLOTS = 64  # of a replica whose slots are `auto`
_READY = 2  # requests beyond the slots, so that none stays empty while the next one is fetched
_LEAST_BOUND = 256  # of requests at hand, where nothing is configured
_LONGEST_WAIT = 0.5  # of an answer's time, where nothing is configured …
_PATIENCE_S = 1.0  # … but at least that
_LONGEST_RETRY_S = 60  # OpenAI's clients ignore longer ones, and come back at once


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
    max_queue_wait_s: float | None = math.inf  # as predicted; None: half as long as an answer takes


def limits_of(config: ServerConfig) -> Limits:
    """As many requests in progress as the targets have slots, and a few that are ready when one gets free."""
    targets = {name: config.models[name] for endpoint in config.endpoints.values() for name in endpoint.models}
    running = {name: _slots(model) * model.replicas + _READY for name, model in targets.items()}
    most = sum(_slots(model) * _most_replicas(model) for model in targets.values())
    max_requests = config.http.max_requests or max(_LEAST_BOUND, 2 * most)
    return Limits(max_requests, config.http.max_tokens, running, config.http.max_queue_wait_s)


def _slots(model: ModelConfig) -> int:
    return _MOST_SLOTS if model.slots == "auto" else model.slots


def _most_replicas(model: ModelConfig) -> int:
    return max(model.replicas, 0 if model.scaling is None else model.scaling.max)


class Admission:
    """The queue in front of the coordinator."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        began: Callable[[Request], None] = lambda request: None,
        slots: Callable[[str], int] = lambda target: 0,
    ) -> None:
        """
        began: is told of each request that begins.
        slots: how many the live replicas of a target have together, as far as is known.
        """
        self._backend, self._limits, self._began, self._slots = backend, limits, began, slots
        self._tickets: dict[int, Ticket] = {}
        self._queue = FairQueue()
        self._running: Counter[str] = Counter()  # by target
        self._held = Counter[ApiKey]()  # requests that need no model
        self._loads = defaultdict[str, Load](Load)  # by target

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Requests that wait, and requests that have begun, by endpoint."""
        waiting, running = Counter[str](), Counter[str]()
        for ticket in self._tickets.values():
            (running if ticket.state == "running" else waiting)[ticket.request.endpoint.name] += 1
        return waiting, running

    def held_back(self, model: str) -> int:
        """Requests that lack a slot of the model: those that wait, and those that were told to come back later."""
        endpoints = [ticket.request.endpoint for ticket in self._tickets.values() if ticket.state == "waiting"]
        waiting = sum(model in (endpoint.target, *endpoint.members) for endpoint in endpoints)
        return waiting + self._loads[model].coming_back(_now_s())

    def check_room(self, targets: Collection[str], key: ApiKey = ANYBODY) -> None:
        """Refuse a request that no target can take on, whatever it says.

        Args:
            targets: one of them would answer it.

        Raises:
            OverloadedError: the server, or the key, has as many requests as it may have, or all queues are too long.
        """
        refusals = {target: self._refusal(1, 0, target, key) for target in targets}
        errors = {target: error for target, error in refusals.items() if error is not None}
        if targets and len(errors) == len(targets):
            self._refuse(*min(errors.items(), key=lambda item: item[1].retry_after_s))

    def check(self, requests: Sequence[Request], key: ApiKey = ANYBODY, priority: int = 0) -> None:
        """Refuse requests that belong together, all or none. How long they wait for each other is not counted.

        Raises:
            OverloadedError: the server, or the key, has all that it may have, or a queue is too long.
        """
        tokens = sum(_tokens(request) for request in requests)
        for target in {request.endpoint.target for request in requests}:
            error = self._refusal(len(requests), tokens, target, key, priority)
            if error is not None:
                self._refuse(target, error, len(requests))

    def check_bounds(self, key: ApiKey) -> None:
        """Raises OverloadedError if the server, or the key, has as many requests as it may have."""
        reached = self._bound_reached(1, 0, key)
        if reached is not None:
            raise _overloaded(*reached, 0.0)

    @contextmanager
    def hold(self, key: ApiKey) -> Iterator[None]:
        """Count a request that needs no model among those in progress; raises as `check_bounds`."""
        self.check_bounds(key)
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
        reached = self._bound_reached(1, ticket.tokens, key)
        if reached is not None:
            wait_s = self._seconds(ticket.target, self._tokens_ahead(ticket.target, key, priority))
            self._refuse(ticket.target, _overloaded(*reached, wait_s))
        if request.timeout_s is not None:
            ticket.deadline = loop.call_later(request.timeout_s, self._expire, request.request_id)
        self._queue.push(ticket, priority, self._holders())
        self._tickets[request.request_id] = ticket
        self._begin_next(ticket.target)

    def progress(self, request_id: int, committed: int) -> None:
        """A request's answer has so many tokens by now."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.state == "running":
            self._loads[ticket.target].committed(committed - ticket.committed)
            ticket.committed = committed

    def cancel(self, request_id: int) -> None:
        """End a request without another delta; unknown and ended ids are ignored."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.state == "running":
            self._backend.cancel(request_id)
        self._forget(request_id)

    def finished(self, request_id: int) -> None:
        """To be called in the event loop when a request's last delta is there."""
        self._forget(request_id)

    def _refuse(self, target: str, error: OverloadedError, requests: int = 1) -> None:
        if not error.bound.startswith("key_"):  # more replicas would not help those
            self._loads[target].refused(requests, error.retry_after_s, _now_s())
        raise error

    def _refusal(
        self, requests: int, tokens: int, target: str, key: ApiKey, priority: int = 0
    ) -> OverloadedError | None:
        """Why requests with so many tokens can't be taken on; None: they can."""
        reached = self._bound_reached(requests, tokens, key)
        if reached is None and self._limits.max_queue_wait_s == math.inf:
            return None
        ahead = self._tokens_ahead(target, key, priority)
        wait_s = self._seconds(target, ahead)
        if reached is None and ahead > self._longest_wait(target):
            reason = f"the request would wait for about {wait_s:.0f} s." if wait_s else "the queue is full."
            reached = "max_queue_wait_s", reason
        return None if reached is None else _overloaded(*reached, wait_s)

    def _bound_reached(self, requests: int, tokens: int, key: ApiKey) -> tuple[Bound, str] | None:
        """Which hard bound would be exceeded by that many more, and in words."""
        every, limits = list(self._tickets.values()), self._limits
        if len(every) + self._held.total() + requests > limits.max_requests:
            return "max_requests", f"{limits.max_requests} requests are in progress already."
        if limits.max_tokens is not None and _sum(every) + tokens > limits.max_tokens:
            return "max_tokens", f"with {tokens} more, the tokens in progress would exceed {limits.max_tokens}."
        if key.max_requests is None and key.max_tokens is None:
            return None
        own = [ticket for ticket in every if ticket.key == key]
        if key.max_requests is not None and len(own) + self._held[key] + requests > key.max_requests:
            return "key_max_requests", f"{key.max_requests} requests are of this API key in progress already."
        if key.max_tokens is not None and _sum(own) + tokens > key.max_tokens:
            reason = f"with {tokens} more, the tokens of this API key in progress would exceed {key.max_tokens}."
            return "key_max_tokens", reason
        return None

    # Predictions

    def _seconds(self, target: str, tokens: float) -> float:
        return self._loads[target].seconds(tokens, _now_s())

    def _longest_wait(self, target: str) -> float:
        """In tokens of one slot. Before the speed is known, it is a whole answer, so that as many may wait as run."""
        load, longest_s = self._loads[target], self._limits.max_queue_wait_s
        speed = load.tokens_per_s(_now_s())
        if longest_s is not None and speed:
            return longest_s * speed
        most = max((one.request.params.max_tokens for one in self._tickets.values() if one.target == target), default=1)
        answer = load.answer_tokens(most)
        return max(_LONGEST_WAIT * answer, _PATIENCE_S * speed) if speed else answer

    def _tokens_ahead(self, target: str, key: ApiKey, priority: int = 0) -> float:
        """How many tokens a slot will write until a request that comes now may begin there."""
        if self._has_room(target):
            return 0.0
        running = [one for one in self._tickets.values() if one.target == target and one.state == "running"]
        before = self._queue.before(target, key, priority, self._holders())
        return self._loads[target].tokens_ahead(running, before, slots=max(1, int(self._limit(target))))

    def _holders(self) -> Iterator[ApiKey]:
        return (ticket.key for ticket in self._tickets.values())

    # Beginning and ending

    def _limit(self, target: str) -> float:
        slots = self._slots(target)
        return max(self._limits.running.get(target, math.inf), slots + _READY if slots else 0)

    def _has_room(self, target: str) -> bool:
        return self._running[target] < self._limit(target)

    def _begin_next(self, target: str) -> None:
        """Begin what the target has room for."""
        while self._has_room(target) and (ticket := self._queue.pop(target)) is not None:
            self._begin(ticket)
        full = not self._has_room(target)
        self._loads[target].runs(self._running[target], full=full, now_s=_now_s())

    def _begin(self, ticket: Ticket) -> None:
        ticket.state = "running"
        self._running[ticket.target] += 1
        request = ticket.request
        waited_s = _now_s() - ticket.arrived_s
        self._began(request)
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
        if ticket is not None and ticket.state == "waiting":
            reason = f"timeout_s: the request waited for {ticket.request.timeout_s:g} s without beginning"
            ticket.sink(Delta("", (), Statistics(), error=DeadlineError(reason)))

    def _forget(self, request_id: int) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        ran, ticket.state = ticket.state == "running", "ended"
        if ran:
            self._running[ticket.target] -= 1
            self._loads[ticket.target].ended(ticket.committed)
            self._begin_next(ticket.target)


def _overloaded(bound: Bound, reason: str, wait_s: float) -> OverloadedError:
    return OverloadedError(reason, bound=bound, retry_after_s=min(max(1, math.ceil(wait_s)), _LONGEST_RETRY_S))


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.params.max_tokens


def _sum(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.tokens for ticket in tickets)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
