"""Start-time fair queueing of tokens between API keys, by priority within a key. Knows no limits and no clock.

Goyal, Vin, Cheng: Start-time Fair Queueing (1996).
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from deployments.admission.ticket import Ticket
from deployments.configuration.access.key_ring import ApiKey

_Entry = tuple[int, int, Ticket]  # priority, order of arrival


@dataclass(slots=True, eq=False)
class _Line:
    """Waiting tickets of one key, in order, and the key's virtual time."""

    served: float
    weight: float
    tickets: deque[Ticket]


class FairQueue:
    """Waiting tickets by target. Tickets that ended while they waited are skipped."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[ApiKey, list[_Entry]]] = {}  # by target
        self._served: dict[ApiKey, float] = {}  # virtual time: tokens / weight
        self._order = count()

    def push(self, ticket: Ticket, priority: int, holders: Iterable[ApiKey]) -> None:
        """Add a ticket. holders: keys of all other tickets, waiting or running."""
        queues = self._queues.setdefault(ticket.target, {})
        if not queues.get(ticket.key):
            self._served[ticket.key] = self._start(ticket.target, ticket.key, holders)
        heapq.heappush(queues.setdefault(ticket.key, []), (priority, next(self._order), ticket))

    def pop(self, target: str) -> Ticket | None:
        """Remove and return the most urgent ticket of the key that was served least; None: nobody waits."""
        queues = self._queues.get(target, {})
        while queues:
            key = min(queues, key=self._served.__getitem__)
            _, _, ticket = heapq.heappop(queues[key])
            if not queues[key]:
                del queues[key]
            if ticket.state == "waiting":
                self._served[key] += ticket.tokens / key.weight
                return ticket
        return None

    def tickets_before(self, target: str, key: ApiKey, priority: int, holders: Iterable[ApiKey]) -> Iterator[Ticket]:
        """Tickets that would begin before a ticket that is pushed now, in order."""
        lines: list[_Line] = []
        own: _Line | None = None
        for other, queue in self._queues.get(target, {}).items():
            entries = sorted(entry for entry in queue if entry[2].state == "waiting")
            if other == key:
                entries = entries[: bisect_right(entries, priority, key=lambda entry: entry[0])]
            line = _Line(self._served[other], other.weight, deque(ticket for _, _, ticket in entries))
            own = line if other == key else own
            if entries or line is own:
                lines.append(line)
        if own is None:
            own = _Line(self._start(target, key, holders), key.weight, deque())
            lines.append(own)
        while (first := min(lines, key=lambda line: line.served)).tickets:
            ticket = first.tickets.popleft()
            yield ticket
            first.served += ticket.tokens / first.weight
            if not first.tickets and first is not own:
                lines.remove(first)

    def _start(self, target: str, key: ApiKey, holders: Iterable[ApiKey]) -> float:
        """Virtual time at which an idle key starts. It gets no credit for the time when it was idle."""
        waiting = [self._served[other] for other, queue in self._queues.get(target, {}).items() if queue]
        if not waiting:  # nobody waits: start level with the running keys
            waiting = [self._served[other] for other in holders if other != key and other in self._served]
        return max(self._served.get(key, 0.0), min(waiting, default=0.0))
