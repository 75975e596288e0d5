"""Start-time fair queueing of tokens between API keys, by priority within a key.

Goyal, Vin, Cheng: Start-time Fair Queueing (1996).
"""

import asyncio
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from actors.coordinator.request import Delta, Request
from deployments.configuration.api_keys import ApiKey

_FEW = 16  # entries of ended tickets, which a line may keep however few wait
Sink = Callable[[Delta], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A waiting or running request."""

    request: Request
    sink: Sink
    key: ApiKey
    arrived_s: float
    priority: int = 0  # among the requests of its key, lower ones begin first
    deadline: asyncio.TimerHandle | None = None
    state: Literal["waiting", "running", "ended"] = "waiting"
    committed: int = 0  # tokens of its answer so far
    charged: bool = True  # whether it counts in its key's minute

    @property
    def tokens(self) -> int:
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def target(self) -> str:
        return self.request.endpoint.target


@dataclass(slots=True)
class Backlog:
    """Waiting requests together."""

    requests: int = 0
    answer_tokens: float = 0.0  # of the longest possible answers
    tokens: float = 0.0  # of prompts and these answers

    def __iadd__(self, other: "Backlog") -> "Backlog":
        self.requests += other.requests
        self.answer_tokens += other.answer_tokens
        self.tokens += other.tokens
        return self

    def begun_with(self, tokens: float) -> "Backlog":
        """Return the part that begins until so many tokens have been served, if all requests are alike."""
        requests = min(self.requests, math.floor(tokens * self.requests / self.tokens) + 1)
        share = requests / self.requests
        return Backlog(requests, share * self.answer_tokens, share * self.tokens)


@dataclass(slots=True, eq=False)
class _Line:
    """Waiting tickets of one key for one target. There may be others that ended while they waited."""

    entries: list[tuple[int, int, Ticket]] = field(default_factory=list)  # a heap by priority and order of arrival
    backlogs: defaultdict[int, Backlog] = field(default_factory=lambda: defaultdict(Backlog))  # by priority

    def backlog(self, priority: float = math.inf) -> Backlog:
        """Return what would begin before a ticket of that priority that is pushed now; inf: all."""
        total = Backlog()
        for other, backlog in self.backlogs.items():
            if other <= priority:
                total += backlog
        return total

    def count(self, ticket: Ticket, times: int) -> None:
        backlog = self.backlogs[ticket.priority]
        backlog += Backlog(times, times * ticket.request.params.max_tokens, times * ticket.tokens)
        if not backlog.requests:
            del self.backlogs[ticket.priority]


class FairQueue:
    """Waiting tickets by target. The cost of each call does not grow with their number."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[ApiKey, _Line]] = {}  # by target; those in which somebody waits
        self._served: dict[ApiKey, float] = {}  # virtual time: tokens / weight
        self._order = count()

    def push(self, ticket: Ticket, holders: Iterable[ApiKey]) -> None:
        """Add a ticket. holders: keys of all other tickets, waiting or running."""
        lines = self._lines.setdefault(ticket.target, {})
        if ticket.key not in lines:
            self._served[ticket.key] = self._start(ticket.target, ticket.key, holders)
            lines[ticket.key] = _Line()
        line = lines[ticket.key]
        heapq.heappush(line.entries, (ticket.priority, next(self._order), ticket))
        line.count(ticket, 1)

    def pop(self, target: str) -> Ticket | None:
        """Remove and return the most urgent ticket of the key that was served least; None: nobody waits."""
        lines = self._lines.get(target)
        if not lines:
            return None
        key = min(lines, key=self._served.__getitem__)
        while True:
            _, _, ticket = heapq.heappop(lines[key].entries)
            if ticket.state == "waiting":
                break
        self.remove(ticket)
        self._served[key] += ticket.tokens / key.weight
        return ticket

    def remove(self, ticket: Ticket) -> None:
        lines = self._lines[ticket.target]
        line = lines[ticket.key]
        line.count(ticket, -1)
        if not line.backlogs:
            del lines[ticket.key]
        elif len(line.entries) > 2 * line.backlog().requests + _FEW:
            line.entries = [entry for entry in line.entries if entry[2].state == "waiting"]
            heapq.heapify(line.entries)

    def backlog_before(self, target: str, key: ApiKey, priority: int, holders: Iterable[ApiKey]) -> Backlog:
        """Return what would begin before a ticket that is pushed now."""
        lines = self._lines.get(target, {})
        own = lines.get(key)
        served = self._start(target, key, holders) if own is None else self._served[key]
        before = Backlog() if own is None else own.backlog(priority)
        begins = served + before.tokens / key.weight  # at this virtual time
        for other, line in lines.items():
            ahead = begins - self._served[other]
            if other != key and ahead >= 0:
                before += line.backlog().begun_with(ahead * other.weight)
        return before

    def _start(self, target: str, key: ApiKey, holders: Iterable[ApiKey]) -> float:
        """Virtual time at which an idle key starts. It gets no credit for the time when it was idle."""
        waiting = [self._served[other] for other in self._lines.get(target, {})]
        if not waiting:  # nobody waits: start level with the running keys
            waiting = [self._served[other] for other in holders if other != key and other in self._served]
        return max(self._served.get(key, 0.0), min(waiting, default=0.0))
