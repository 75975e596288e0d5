"""Deltas on their way from replicas to an answer. Under load, those of several steps leave together.

Whatever leaves at once costs this process, the proxy and the client about the same. Knows no HTTP.
"""

import asyncio

from actors.coordinator.request import Delta

DeltaBatch = list[tuple[int, Delta]]  # index of the request, its delta

_STREAM_S = 0.005  # so all streams together send 200 times a second, which takes about a tenth of a core


class StreamPace:
    """How often streams pass on what they have: the more there are, the less often."""

    def __init__(self, most_s: float = 0.0) -> None:
        """most_s: the longest interval; 0: everything is passed on at once."""
        self._most_s = most_s
        self.streams = 0  # in progress

    @property
    def interval_s(self) -> float:
        """The least time between two batches of a stream, in seconds."""
        return min(_STREAM_S * self.streams, self._most_s)


class DeltaQueue:
    """The deltas of one answer. It belongs to one event loop.

    A batch leaves when a delta comes after the interval, since other streams get theirs then, too. A timer for each
    stream would wake the process more often, so there is one only for twice the interval.
    """

    def __init__(self, pace: StreamPace | None = None) -> None:
        """pace: of its batches; None: they are passed on at once."""
        self._pace = pace
        self._deltas: DeltaBatch = []
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next_s = 0.0  # when the next batch is due, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None  # while it holds deltas back

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of the request with that index. A request's last one does not wait."""
        self._deltas.append((index, delta))
        if delta.finish is not None or delta.error is not None or self._loop.time() >= self._next_s:
            self._ready.set()
        elif self._timer is None and self._pace is not None:
            self._timer = self._loop.call_at(self._next_s + self._pace.interval_s, self._ready.set)

    async def batch(self) -> DeltaBatch:
        """Return all deltas that have come, at least one, once they are due."""
        await self._ready.wait()
        self._ready.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pace is not None:
            self._next_s = self._loop.time() + self._pace.interval_s
        batch, self._deltas = self._deltas, []
        return batch
