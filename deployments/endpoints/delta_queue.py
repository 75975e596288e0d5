"""Deltas on their way from replicas to an answer. Under load, those of several steps leave together.

Whatever leaves at once costs this process, the proxy and the client about the same. Knows no HTTP.
"""

import asyncio
from contextlib import suppress

from actors.coordinator.request import Delta

DeltaBatch = list[tuple[int, Delta]]  # index of the request, its delta

_STREAM_S = 0.003  # so all streams together send 333 times a second, which takes about a fifth of a core


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
    """The deltas of one answer. It belongs to one event loop."""

    def __init__(self, pace: StreamPace | None = None) -> None:
        """pace: of its batches; None: they are passed on at once."""
        self._pace = pace
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._ending = asyncio.Event()  # set while it holds a request's last delta
        self._next_s = 0.0  # when the next batch is due, by the loop's clock

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of the request with that index."""
        self._deltas.put_nowait((index, delta))
        if delta.finish is not None or delta.error is not None:
            self._ending.set()

    async def batch(self) -> DeltaBatch:
        """Return all deltas that have come, at least one, once they are due: at once if one is a request's last."""
        batch = [await self._deltas.get()]
        loop = asyncio.get_running_loop()
        if self._pace is not None and loop.time() < self._next_s:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_s):
                    await self._ending.wait()
        while not self._deltas.empty():
            batch.append(self._deltas.get_nowait())
        self._ending.clear()
        if self._pace is not None:
            self._next_s = loop.time() + self._pace.interval_s
        return batch
