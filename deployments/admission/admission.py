"""Decides whether a request is accepted and when it begins: bounded, fair between API keys, before its deadline.

Requests wait here, not at the models, so one client's backlog can't delay another's. Runs in one event loop.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError
from deployments.admission.bounds import READY, Bounds, Limits
from deployments.admission.fair_queue import FairQueue, Sink, Ticket
from deployments.admission.key_bounds import Reached, Use
from deployments.admission.key_ledger import SharedLimits
from deployments.admission.load import Load
from deployments.configuration.api_keys import ANYBODY, ApiKey

_LONGEST_WAIT = 0.5  # default longest wait, as a share of the time of an answer
_PATIENCE_S = 1.0  # least default longest wait
_USUAL_ANSWER_S = 2.0  # while the speed is unknown


class Backend(Protocol):
    """Runs requests: the coordinator."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: int) -> None: ...


class Refusal(NamedTuple):
    """Why a target accepts no more requests, and when to ask again."""

    reached: Reached
    retry_s: float
    target: str
    apart_s: float  # time from one refused request that comes again to the next


class Room(NamedTuple):
    """How many more requests are accepted, and the refusal of the one after them."""

    requests: int
    refusal: Refusal


class Admission:
    """The queue in front of the coordinator."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        on_begin: Callable[[Request], None] = lambda request: None,
        count_slots: Callable[[str], int] = lambda target: 0,
        shared: SharedLimits | None = None,
        count_coordinators: Callable[[], int] = lambda: 1,
    ) -> None:
        """
        on_begin: called with each request that begins.
        count_slots: known slots of a target's live replicas that this coordinator may use.
        shared: limits of keys that hold for other coordinators, too; None: there are no others.
        count_coordinators: those that share the targets, this one included.
        """
        self._backend, self._limits = backend, limits
        self._on_begin, self._count_slots, self._count_coordinators = on_begin, count_slots, count_coordinators
        self._tickets: dict[int, Ticket] = {}
        self._arriving = Counter[ApiKey]()  # requests that are being read
        self._queue = FairQueue()
        self._running = defaultdict[str, dict[int, Ticket]](dict)  # by target, by id
        self._loads = defaultdict[str, Load](Load)  # by target
        self._shared = shared
        self._bounds = Bounds(limits, shared)
        self.on_change: Callable[[], None] = lambda: None  # called when requests came, were refused or ended

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        waiting, running = Counter[str](), Counter[str]()
        for ticket in self._tickets.values():
            (running if ticket.state == "running" else waiting)[ticket.request.endpoint.name] += 1
        return waiting, running

    def count_unserved(self, model: str) -> int:
        """Number of requests that lack a slot of the model: waiting, or refused and not yet due; without any, all."""
        has_slots = self._count_slots(model) > 0
        tickets = [ticket for ticket in self._tickets.values() if ticket.state == "waiting" or not has_slots]
        endpoints = [ticket.request.endpoint for ticket in tickets]
        waiting = sum(model in (endpoint.target, *endpoint.members) for endpoint in endpoints)
        return waiting + self._loads[model].count_returning(_now_s())

    def predicted_wait_s(self, target: str) -> float:
        """Return how long a request without a key would wait now; 0 while the speed is unknown."""
        return self._loads[target].seconds(self._tokens_ahead(target, ANYBODY), _now_s())

    def check_room(self, targets: Collection[str], key: ApiKey = ANYBODY) -> None:
        """Refuse a request before its body is read (OverloadedError) if none of its possible targets accepts it."""
        if targets and not (room := self.room(targets, key)).requests:
            self._refuse(room.refusal)

    def room(self, targets: Collection[str], key: ApiKey) -> Room:
        """Return how many requests of a key would be accepted, if their answers have the usual length."""
        rooms = [self._room(target, key) for target in targets]
        requests = sum(room.requests for room in rooms) - self._arriving[key]
        return Room(max(0, requests), min((room.refusal for room in rooms), key=lambda refusal: refusal.retry_s))

    def arrive(self, key: ApiKey) -> Callable[[], None]:
        """Count a request that is being read. Returns what to call once it is submitted or has failed, or both."""

        def end() -> None:
            self._arriving[key] -= 1
            if not self._arriving[key]:
                del self._arriving[key]
            self.on_change()

        self._arriving[key] += 1
        arrival = ExitStack()
        arrival.callback(end)
        return arrival.close

    def check(self, requests: Sequence[Request], key: ApiKey = ANYBODY, priority: int = 0) -> None:
        """Refuse all requests of a group (OverloadedError), or none. Waiting within the group is ignored."""
        new = _use_of(requests)
        for target in {request.endpoint.target for request in requests}:
            refusal = self._refusal(new, target, key, priority)
            if refusal is not None:
                self._refuse(refusal, len(requests))

    @asynccontextmanager
    async def reserve(
        self,
        requests: Sequence[Request],
        key: ApiKey,
        priority: int = 0,
        *,
        admitted: bool = False,
        charged: bool = True,
    ) -> AsyncIterator[None]:
        """Check a group as `check` does, also against what its key uses at other coordinators. Submit it in the block.

        admitted: the requests belong to one that was accepted already, and are only counted.
        charged: as in `submit`.
        """
        if not admitted:
            self.check(requests, key, priority)
        if self._shared is None or not (requests and charged and key.is_limited):
            yield
            return
        new = _use_of(requests)
        if admitted:
            self._shared.begin(key, new)
            yield
            return
        async with self._shared.reserve(key, new):
            self.check(requests, key, priority)  # others may have begun meanwhile
            yield

    def check_bounds(self, key: ApiKey) -> None:
        reached = self._bounds.reached(Use(1), key, _now_s())
        if reached is not None:
            raise reached.error()

    def hold(self, key: ApiKey) -> AbstractContextManager[None]:
        self.check_bounds(key)
        return self._bounds.hold(key)

    def submit(
        self, request: Request, sink: Sink, *, key: ApiKey = ANYBODY, priority: int = 0, charged: bool = True
    ) -> None:
        """Begin a request now or queue it. Raises OverloadedError if the server or the key is at its bound.

        What its key may begin in a minute is for `check`, whole groups at a time.

        sink: called with each delta, from any thread; must not block.
        priority: among the requests of one key, lower priorities begin first.
        charged: whether it counts in its key's minute.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, sink, key, loop.time(), priority, charged=charged)
        new = Use(1, ticket.tokens)
        reached = self._bounds.reached(new, key, _now_s(), rates=False)
        if reached is not None:
            self._refuse(self._retried(reached, ticket.target, self._tokens_ahead(ticket.target, key, priority)))
        if charged:
            self._bounds.take(key, new, _now_s())
        if request.timeout_s is not None:
            ticket.deadline = loop.call_later(request.timeout_s, self._expire, request.request_id)
        self._queue.push(ticket, self._bounds.holders)
        self._tickets[request.request_id] = ticket
        self._bounds.count(ticket, 1)
        self._begin_next(ticket.target)
        self.on_change()

    def begin_waiting(self) -> None:
        """Begin the requests for which there is room by now. Call it in the event loop when slots may have come."""
        for target in {ticket.target for ticket in self._tickets.values() if ticket.state == "waiting"}:
            self._begin_next(target)

    def record_progress(self, request_id: int, committed: int) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.state == "running":
            self._loads[ticket.target].add_tokens(max(committed - ticket.committed, 0))
            ticket.committed = committed

    def cancel(self, request_id: int) -> None:
        """End a request without another delta. Unknown and ended ids are ignored."""
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.state == "running":
            self._backend.cancel(request_id)
        self._forget(request_id)

    def finish(self, request_id: int) -> None:
        """Release a request after its last delta. Call it in the event loop."""
        self._forget(request_id)

    def _refuse(self, refusal: Refusal, requests: int = 1) -> None:
        error = refusal.reached.error(refusal.retry_s)
        self.count_refused(refusal, requests, error.retry_after_s)
        self.on_change()
        raise error

    def count_refused(self, refusal: Refusal, requests: int, retry_after_s: int) -> None:
        """Count requests that were refused, here or elsewhere, and when they will come again."""
        if not refusal.reached.bound.startswith("key_"):  # more replicas would not help against the bounds of a key
            self._loads[refusal.target].add_refused(requests, retry_after_s, _now_s())

    def _refusal(self, new: Use, target: str, key: ApiKey, priority: int = 0) -> Refusal | None:
        reached = self._bounds.reached(new, key, _now_s())
        if reached is None and self._limits.max_queue_wait_s == math.inf:
            return None
        ahead = self._tokens_ahead(target, key, priority)
        if reached is None and ahead > self._longest_wait(target):
            reached = self._too_long(self._loads[target].seconds(ahead, _now_s()))
        return None if reached is None else self._retried(reached, target, ahead)

    def _too_long(self, wait_s: float) -> Reached:
        """Return the bound of the queue. wait_s: predicted; 0: unknown."""
        expected = f"the request would wait for about {wait_s:.0f} s" if wait_s else "the queue is too long"
        longest_s = self._limits.max_queue_wait_s
        longest = f"{longest_s:g} s" if longest_s else "half as long as an answer takes"
        return Reached("max_queue_wait_s", f"{expected}; http.max_queue_wait_s allows {longest}.")

    def _retried(self, reached: Reached, target: str, ahead: float) -> Refusal:
        load, now_s = self._loads[target], _now_s()
        apart_s = load.apart_s(self._slots(target), now_s)
        return Refusal(reached, load.seconds(ahead, now_s) + load.count_returning(now_s) * apart_s, target, apart_s)

    def _room(self, target: str, key: ApiKey) -> Room:
        refusal = self._refusal(Use(1), target, key)
        if refusal is not None:
            return Room(0, refusal)
        requests, longest = self._bounds.most_requests(key), self._longest_wait(target)
        if longest < math.inf:  # those of usual length that begin in time, after those that wait
            slots, each, running = self._slots(target), self._usual_answer(target), self._running[target].values()
            beginning = self._loads[target].count_beginning(running, slots, each, longest)
            ahead = self._queue.backlog_before(target, key, 0, self._bounds.holders).requests
            requests = min(requests, beginning - ahead)
        requests = max(1, requests)
        reached = self._bounds.reached(Use(requests + 1), key, _now_s(), rates=False)
        reached = reached or self._too_long(self._loads[target].seconds(longest, _now_s()))
        return Room(requests, self._retried(reached, target, longest))

    def _longest_wait(self, target: str) -> float:
        """Longest accepted wait, in tokens of one slot."""
        load, longest_s = self._loads[target], self._limits.max_queue_wait_s
        speed = load.tokens_per_s(_now_s())
        if longest_s and speed:
            return longest_s * speed
        answer = self._usual_answer(target)
        if longest_s:
            return answer * longest_s / _USUAL_ANSWER_S
        return max(_LONGEST_WAIT * answer, _PATIENCE_S * speed) if speed else answer

    def _usual_answer(self, target: str) -> float:
        longest = (ticket.request.params.max_tokens for ticket in self._running[target].values())
        return self._loads[target].answer_tokens(max(longest, default=math.inf))

    def _tokens_ahead(self, target: str, key: ApiKey, priority: int = 0) -> float:
        """Expected tokens of one slot before a request that arrives now begins there."""
        if self._has_room(target):
            return 0.0
        before = self._queue.backlog_before(target, key, priority, self._bounds.holders)
        return self._loads[target].tokens_ahead(self._running[target].values(), before, self._slots(target))

    def _slots(self, target: str) -> int:
        return max(1, int(min(self._limit(target), self._limits.max_requests)))

    def _limit(self, target: str) -> float:
        slots = self._count_slots(target)
        configured = self._limits.running.get(target, math.inf) / self._count_coordinators()
        return max(configured, slots + READY if slots else 0)

    def _has_room(self, target: str) -> bool:
        return len(self._running[target]) < self._limit(target)

    def _begin_next(self, target: str) -> None:
        while self._has_room(target) and (ticket := self._queue.pop(target)) is not None:
            self._begin(ticket)
        self._loads[target].set_running(len(self._running[target]), full=not self._has_room(target), now_s=_now_s())

    def _begin(self, ticket: Ticket) -> None:
        ticket.state = "running"
        request = ticket.request
        self._running[ticket.target][request.request_id] = ticket
        waited_s = _now_s() - ticket.arrived_s
        self._on_begin(request)
        if ticket.deadline is not None and request.timeout_s is not None:
            ticket.deadline.cancel()
            request = replace(request, timeout_s=max(request.timeout_s - waited_s, 0.001))
        try:
            self._backend.submit(request, ticket.sink)
        except ConsortError as error:
            ticket.sink(Delta("", (), Statistics(), error=error))

    def _expire(self, request_id: int) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.state == "waiting":
            reason = f"timeout_s: the request waited for {ticket.request.timeout_s:g} s without beginning"
            ticket.sink(Delta("", (), Statistics(), error=DeadlineError(reason)))

    def _forget(self, request_id: int) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        self._bounds.count(ticket, -1)
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        if ticket.charged:
            unused = Use(0, ticket.request.params.max_tokens - ticket.committed)
            self._bounds.give_back(ticket.key, unused, _now_s())
        was_running, ticket.state = ticket.state == "running", "ended"
        if not was_running:
            self._queue.remove(ticket)
        else:
            del self._running[ticket.target][request_id]
            if ticket.committed:  # a request that was cancelled at once says nothing of answers
                self._loads[ticket.target].add_answer(ticket.committed)
            self._begin_next(ticket.target)
        self.on_change()


def _use_of(requests: Sequence[Request]) -> Use:
    return Use(len(requests), sum(len(request.prompt) + request.params.max_tokens for request in requests))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
