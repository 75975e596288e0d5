"""Writes answers without holding up the event loop: what is large in a thread, the rest in slices."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

from actors.coordinator.request import Delta
from deployments.answers.writer import Writer
from deployments.endpoints.answer_events import EventBatch
from deployments.strategies.progress import Outcome, Progress

_SLICE = 32  # events of a usual stream that are written at once
_SMALL_ANSWER = 2000  # tokens that are joined at once

_Result = TypeVar("_Result")


class Renderer:
    """Of one answer: calls its writer, one call after the other."""

    def __init__(self, writer: Writer, thread: ThreadPoolExecutor | None) -> None:
        """thread: for an answer of which each part may take long; None: a part is written at once."""
        self._writer, self._thread = writer, thread
        self._tokens = 0

    async def begin(self) -> str:
        """The events before the first."""
        return await self._call(self._writer.begin)

    async def add(self, batch: EventBatch) -> str:
        """Take in events; returns those of the stream."""
        texts, events = [], iter(batch)
        while part := list(islice(events, _SLICE)):
            texts.append(await self._call(lambda part=part: "".join(self._write(part))))  # type: ignore[misc]
            if len(part) == _SLICE:
                await asyncio.sleep(0)  # others may have waited
        return "".join(texts)

    async def end(self) -> str:
        """The events after the last."""
        return await self._call(self._writer.end)

    async def fail(self, error: Exception) -> str:
        """The last event of a stream that can't go on."""
        return await self._call(lambda: self._writer.fail(error))

    async def whole(self) -> bytes:
        """The whole answer as JSON."""

        def write() -> bytes:
            return msgspec.json.encode(self._writer.whole())

        if self._thread is None and self._tokens > _SMALL_ANSWER:
            return await asyncio.to_thread(write)
        return await self._call(write)

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _write(self, batch: EventBatch) -> Iterator[str]:
        for index, event in batch:
            match event:
                case Outcome():
                    self._tokens += len(event.delta.tokens)
                    yield self._writer.tell(index, event) + self._writer.add(index, event.delta)
                case Progress():
                    yield self._writer.tell(index, event)
                case Delta():
                    self._tokens += len(event.tokens)
                    yield self._writer.add(index, event)
