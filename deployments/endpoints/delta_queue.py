"""Deltas on their way from replicas to an answer. Under load, those of several steps leave together.

Whatever leaves at once costs this process, the proxy and the client about the same.
"""

import asyncio

from actors.coordinator.request import Delta

DeltaBatch = list[tuple[int, Delta]]  # index of the request, its delta

_OTHER_STREAM_S = 0.005  # so up to 21 streams together send 200 times a second, which takes about a tenth of a core


class StreamPace:
    """How long streams hold deltas back: the more there are, the longer. One stream alone holds nothing back."""

    def __init__(self, most_s: float = 0.0) -> None:
        """most_s: the longest time, in seconds; 0: nothing is held back."""
        self._most_s = most_s
        self.streams = 0  # that have begun

    @property
    def interval_s(self) -> float:
        """Seconds from one batch of a stream until the next is due. After twice as long it leaves in any case."""
        return min(_OTHER_STREAM_S * max(self.streams - 1, 0), self._most_s / 2)


class DeltaQueue:
    """The deltas of one answer. It belongs to one event loop.

    What is due leaves when the next delta comes, since other streams get theirs then, too. A timer, which wakes the
    process, waits twice the interval.
    """

    def __init__(self, pace: StreamPace | None = None) -> None:
        """pace: of its batches; None: they are passed on at once."""
        self._pace = pace or StreamPace()
        self._deltas: DeltaBatch = []
        self._begun: set[int] = set()  # indices of requests
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0  # when the next batch is due, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None  # while it holds deltas back
        self._counts = False  # whether it is one of the pace's streams

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of the request with that index. A request's first and last ones are due at once."""
        self._deltas.append((index, delta))
        is_edge = index not in self._begun or delta.finish is not None or delta.error is not None
        self._begun.add(index)
        if is_edge or self._loop.time() >= self._due_s:
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s + self._pace.interval_s, self._ready.set)

    async def batch(self) -> DeltaBatch:
        """Return all deltas that have come, at least one, once they are due; raise a delta's error after those."""
        await self._ready.wait()
        self._ready.clear()
        self._stop_timer()
        self._pace.streams += not self._counts
        self._counts = True
        self._due_s = self._loop.time() + self._pace.interval_s
        batch, self._deltas = self._deltas, []
        for position, (_, delta) in enumerate(batch):
            if delta.error is not None:
                if position == 0:
                    raise delta.error
                self._deltas = batch[position:]
                self._ready.set()
                return batch[:position]
        return batch

    def close(self) -> None:
        """Hold nothing back any more, and count as no stream."""
        self._stop_timer()
        self._pace.streams -= self._counts
        self._counts = False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
