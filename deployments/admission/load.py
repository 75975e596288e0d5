"""Load of one target: speed of its requests, length of their answers, refused requests."""

import heapq
import math
from collections import Counter
from collections.abc import Collection

from deployments.admission.fair_queue import Backlog, Ticket

_MEMORY_S = 10.0  # over which speed is averaged
_SMOOTHING = 0.1  # weight of a new answer in the mean length
_LEAST_S = 1.0  # of measurement, before a speed counts as known
_ALONE_S = 10.0  # the same while no answer has ended: prompts take more of the time then
_USUAL_TOKENS = 256  # of an answer, before the first has ended
_TRIES = 4  # of refused requests, for each answer that ends


class _Speed:
    """Tokens per second of one request: an exponential average over the running requests."""

    def __init__(self) -> None:
        self._tokens = self._request_s = self._seen_s = 0.0
        self._has_answers = False

    def add_tokens(self, tokens: int) -> None:
        self._tokens += tokens

    def add_answer(self) -> None:
        self._has_answers = True

    def add_time(self, running: int, seconds: float) -> None:
        decay = math.exp(-seconds / _MEMORY_S)
        self._tokens *= decay
        self._request_s = decay * self._request_s + running * seconds
        self._seen_s += seconds

    @property
    def tokens_per_s(self) -> float | None:
        is_known = self._seen_s >= (_LEAST_S if self._has_answers else _ALONE_S)
        return self._tokens / self._request_s if is_known and self._tokens else None


class Load:
    """Load of one target, as one coordinator sees it. Times are the event loop's."""

    def __init__(self) -> None:
        self._speeds = {full: _Speed() for full in (False, True)}  # each request is faster when few run
        self._running, self._full, self._seen_s = 0, False, 0.0
        self._answer_tokens: float | None = None
        self._returning: Counter[int] = Counter()  # refused requests by the second of their retry

    def set_running(self, running: int, *, full: bool, now_s: float) -> None:
        """Set how many requests run from now on. full: another request would have to wait."""
        self._advance(now_s)
        self._running, self._full = running, full

    def add_tokens(self, tokens: int) -> None:
        self._speeds[self._full].add_tokens(tokens)

    def add_answer(self, tokens: int) -> None:
        self._speeds[self._full].add_answer()
        mean = tokens if self._answer_tokens is None else self._answer_tokens
        self._answer_tokens = mean + _SMOOTHING * (tokens - mean)

    def add_refused(self, requests: int, retry_after_s: int, now_s: float) -> None:
        self._returning[math.ceil(now_s + retry_after_s)] += requests
        self._drop_past(now_s)

    def count_returning(self, now_s: float) -> int:
        """Number of refused requests whose time to retry has not come yet."""
        self._drop_past(now_s)
        return self._returning.total()

    def apart_s(self, slots: int, now_s: float) -> float:
        """Seconds between refused requests that come again, so that just enough come to keep all slots busy."""
        return self.seconds(self.answer_tokens(math.inf), now_s) / slots / _TRIES

    def tokens_per_s(self, now_s: float) -> float | None:
        """Speed of one request with all slots taken, or if unknown with free slots; None: both unknown."""
        self._advance(now_s)
        return self._speeds[True].tokens_per_s or self._speeds[False].tokens_per_s

    def answer_tokens(self, most: float) -> float:
        """Expected length of an answer of at most `most` tokens."""
        usual = _USUAL_TOKENS if self._answer_tokens is None else max(1.0, self._answer_tokens)
        return min(most, usual)

    def tokens_ahead(self, running: Collection[Ticket], before: Backlog, slots: int) -> float:
        """Expected tokens of one slot until the next request begins there, after those `before`."""
        ends = sorted(self._tokens_left(ticket) for ticket in running)[-slots:]  # sorted, so a heap
        if not before.requests:
            return ends[0]
        each = self.answer_tokens(before.answer_tokens / before.requests)
        rounds = max(0, before.requests // len(ends) - 2)  # after two, all slots end within the time of an answer
        for _ in range(before.requests - rounds * len(ends)):
            heapq.heapreplace(ends, ends[0] + each)
        return ends[0] + rounds * each

    def count_beginning(self, running: Collection[Ticket], slots: int, each: float, tokens: float) -> int:
        """Count requests of `each` tokens that begin within so many tokens of one slot, if enough of them wait."""
        free = max(0, slots - len(running))
        ends = [*[0.0] * free, *sorted(self._tokens_left(ticket) for ticket in running)[-slots:]]
        return sum(math.floor((tokens - end) / each) + 1 for end in ends if end <= tokens)

    def seconds(self, tokens: float, now_s: float) -> float:
        """Seconds in which one slot generates the tokens; 0 while the speed is unknown."""
        speed = self.tokens_per_s(now_s)
        return tokens / speed if speed else 0.0

    def _tokens_left(self, ticket: Ticket) -> float:
        """Expected remaining tokens of a running answer: a mean answer, within its `max_tokens`."""
        return self.answer_tokens(max(1, ticket.request.params.max_tokens - ticket.committed))

    def _drop_past(self, now_s: float) -> None:
        for second in [second for second in self._returning if second <= now_s]:
            del self._returning[second]

    def _advance(self, now_s: float) -> None:
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        if self._running:
            self._speeds[self._full].add_time(self._running, passed_s)
