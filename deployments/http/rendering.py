"""Writes answers without blocking the event loop: large ones in a thread, others in slices. Knows no formats."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

from actors.coordinator.request import Delta
from deployments.apis.writer import Writer
from deployments.endpoints.service import EventBatch
from deployments.strategies.deliberation import Outcome, Progress

_SLICE = 32  # events that are written without a pause
_SMALL_ANSWER = 2000  # tokens; larger whole answers are written in a thread

_Result = TypeVar("_Result")


class Renderer:
    """Calls the writer of one answer, one call at a time."""

    def __init__(self, writer: Writer, thread: ThreadPoolExecutor | None) -> None:
        """thread: for an answer whose parts may take long to write; None: parts are written in the event loop."""
        self._writer, self._thread = writer, thread
        self._tokens = 0

    async def begin(self) -> str:
        return await self._call(self._writer.begin)

    async def add(self, batch: EventBatch) -> str:
        """Add a batch of events; return the stream's text for it."""
        texts, events = [], iter(batch)
        while part := list(islice(events, _SLICE)):
            texts.append(await self._call(lambda part=part: "".join(self._write(part))))  # type: ignore[misc]
            if len(part) == _SLICE:
                await asyncio.sleep(0)  # let other tasks run
        return "".join(texts)

    async def end(self) -> str:
        return await self._call(self._writer.end)

    async def fail(self, error: Exception) -> str:
        return await self._call(lambda: self._writer.fail(error))

    async def whole(self) -> bytes:

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
                    yield self._writer.add_progress(index, event) + self._writer.add(index, event.delta)
                case Progress():
                    yield self._writer.add_progress(index, event)
                case Delta():
                    self._tokens += len(event.tokens)
                    yield self._writer.add(index, event)
