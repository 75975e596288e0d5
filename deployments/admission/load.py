"""How fast a target's requests get on, how long their answers are, and how many were told to come back."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable

from deployments.admission.ticket import Ticket

_MEMORY_S = 10.0  # over which speed is averaged
_SMOOTHING = 0.1  # of the length of answers
_LEAST_S = 1.0  # of a speed, before it counts as known


class _Speed:
    """Tokens per second of one request, averaged over the requests that run."""

    def __init__(self) -> None:
        self._tokens = self._request_s = self._seen_s = 0.0  # older ones count less

    def add_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def add_time(self, running: int, seconds: float) -> None:
        kept = math.exp(-seconds / _MEMORY_S)
        self._tokens *= kept
        self._request_s = kept * self._request_s + running * seconds
        self._seen_s += seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known yet."""
        return self._tokens / self._request_s if self._seen_s >= _LEAST_S and self._tokens else None


class Load:
    """One target, as one coordinator sees it. Times are the event loop's."""

    def __init__(self) -> None:
        self._speeds = {full: _Speed() for full in (False, True)}  # with few requests each one is faster
        self._running, self._full, self._seen_s = 0, False, 0.0
        self._answer_tokens: float | None = None
        self._coming_back: Counter[int] = Counter()  # refused requests, by the second

    def runs(self, running: int, *, full: bool, now_s: float) -> None:
        """From now on so many requests run. full: another would have to wait."""
        self._pass(now_s)
        self._running, self._full = running, full

    def committed(self, tokens: int) -> None:
        """A running request got so many tokens."""
        self._speeds[self._full].add_tokens(tokens)

    def ended(self, tokens: int) -> None:
        """A request has left its slot with so many tokens."""
        before = tokens if self._answer_tokens is None else self._answer_tokens
        self._answer_tokens = before + _SMOOTHING * (tokens - before)

    def refused(self, requests: int, retry_after_s: int, now_s: float) -> None:
        """So many requests were told to come back then."""
        self._coming_back[math.ceil(now_s + retry_after_s)] += requests
        self._drop_past(now_s)

    def coming_back(self, now_s: float) -> int:
        """Refused requests that have not had the time to come back: they wait elsewhere."""
        self._drop_past(now_s)
        return self._coming_back.total()

    def tokens_per_s(self, now_s: float) -> float | None:
        """Speed of one request while every slot is taken, or else while they never were; None: not known yet."""
        self._pass(now_s)
        return self._speeds[True].tokens_per_s or self._speeds[False].tokens_per_s

    def answer_tokens(self, most: int) -> float:
        """Length to expect of an answer that may have so many tokens."""
        return float(most) if self._answer_tokens is None else min(float(most), max(1.0, self._answer_tokens))

    def tokens_ahead(self, running: Iterable[Ticket], before: Iterable[Ticket], slots: int) -> float:
        """How many tokens a slot will write until the next request may begin there.

        Args:
            running: requests that hold the slots, all of them.
            before: those that begin earlier, in their order.
        """
        ends = sorted(self._tokens_left(ticket) for ticket in running)[-slots:]  # a heap, too
        for ticket in before:
            heapq.heapreplace(ends, ends[0] + self._tokens_left(ticket))
        return ends[0]

    def seconds(self, tokens: float, now_s: float) -> float:
        """The time in which a slot writes so many tokens; 0 while the speed is not known."""
        speed = self.tokens_per_s(now_s)
        return tokens / speed if speed else 0.0

    def _tokens_left(self, ticket: Ticket) -> float:
        """What an answer will still get: as much as others have, unless it may not."""
        return self.answer_tokens(max(1, ticket.request.params.max_tokens - ticket.committed))

    def _drop_past(self, now_s: float) -> None:
        for second in [second for second in self._coming_back if second <= now_s]:
            del self._coming_back[second]

    def _pass(self, now_s: float) -> None:
        """Count the time since the last look."""
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        if self._running:
            self._speeds[self._full].add_time(self._running, passed_s)
