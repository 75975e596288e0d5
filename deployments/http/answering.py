"""Responds to a request for text: with a whole answer, or with a stream of server-sent events.

Answers are written without blocking the event loop: large ones in a thread, others in slices.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from actors.coordinator.request import Delta
from decoding.errors import ConsortError
from deployments.apis.resumable import LAST_EVENT_ID, ResumableWriter, last_event
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.endpoints.bounds import count_reported_tokens
from deployments.endpoints.service import EventBatch, Service
from deployments.fields.generation import GenerationRequest
from deployments.http.head import WEIGHTS, resolve_model
from deployments.strategies.panel import Outcome, Progress

_MOST_REPORTED_TOKENS = 2000  # answers that report more are written in a thread
_SMALL_ANSWER = 2000  # tokens; larger whole answers are written in a thread
_SLICE = 32  # events that are written without a pause
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Keep = Callable[[Any], Awaitable[None]]  # what to do with the writer of a whole answer before the client has the end


async def answer(
    service: Service,
    request: Request,
    body: GenerationRequest,
    make_writer: Callable[..., Writer],
    thread: ThreadPoolExecutor,
    keep: Keep | None = None,
) -> Response:
    """Respond with a whole answer or a stream. Errors before a stream's first delta keep their HTTP status.

    thread: for answers that may take long to write.
    keep: called once the model has ended the answer; not if the client has left before.
    """
    state = request.state
    body.model = resolve_model(body.model, request)
    served = service.endpoint(body.model)
    state.endpoint, state.ignored = served.name, served.ignored_fields(body)
    last_id = request.headers.get(LAST_EVENT_ID)
    stays = service.coordinator.weights(served.endpoint.target) is None  # other weights would write another text
    resumable = last_id is not None and stays and served.may_resume(body)
    after = last_event(last_id, body, resumable=resumable)
    identity = AnswerIdentity.new(body.seed_or_new()) if after is None else after.identity
    requests = await service.prepare(body, seed=identity.seed, key=state.key)

    def make() -> Writer:
        writer = make_writer(body, requests, served.token_decoder, identity=identity)
        return ResumableWriter(writer, identity, len(requests), after) if resumable else writer

    if state.large or count_reported_tokens(body, requests) > _MOST_REPORTED_TOKENS:
        writer = await asyncio.get_running_loop().run_in_executor(thread, make)
        renderer = _Renderer(writer, thread, keep)
    else:
        renderer = _Renderer(make(), None, keep)
    headers = service.cache_headers(requests)
    state.end_arrival()  # counted as submitted from here
    batches = service.answer(
        served,
        body,
        requests,
        key=state.key,
        priority=body.priority or 0,
        arrived_s=state.arrived_s,
        streamed=bool(body.stream),
    )
    if not body.stream:
        versions: dict[str, str] = {}
        async with aclosing(batches):
            async for batch in batches:
                versions |= _versions_header(batch)
                await renderer.add(batch)
        await renderer.keep()
        return Response(await renderer.whole(), media_type="application/json", headers=headers | versions)
    first = await anext(batches)
    events = _events(request, first, batches, renderer)
    headers = _SSE_HEADERS | headers | _versions_header(first)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _versions_header(batch: EventBatch) -> dict[str, str]:
    """Return the header that names the weights which wrote an answer, if they can be replaced."""
    versions = {event.weights for _, event in batch if isinstance(event, Delta) and event.weights is not None}
    return {WEIGHTS: "+".join(sorted(versions))} if versions else {}


async def _events(
    request: Request, first: EventBatch, rest: AsyncGenerator[EventBatch, None], renderer: "_Renderer"
) -> AsyncGenerator[str, None]:
    """Server-sent events of an answer. An error in mid-stream becomes the last event."""
    async with aclosing(rest):
        try:
            yield await renderer.call(renderer.writer.begin) + await renderer.add(first)
            async for batch in rest:
                yield await renderer.add(batch)
            await renderer.keep()
        except Exception as error:
            if not isinstance(error, ConsortError):
                _logger.exception("a stream failed")
            request.state.error = error
            yield await renderer.call(partial(renderer.writer.fail, error))
            return
        yield await renderer.call(renderer.writer.end)


class _Renderer:
    """Calls the writer of one answer, one call at a time: in a thread, or if None in the event loop."""

    def __init__(self, writer: Writer, thread: ThreadPoolExecutor | None, keep: Keep | None) -> None:
        self.writer, self._thread, self._keep = writer, thread, keep
        self._tokens = 0

    async def add(self, batch: EventBatch) -> str:
        """Add a batch of events; return the stream's text for it."""
        texts, events = [], iter(batch)
        while part := list(islice(events, _SLICE)):
            texts.append(await self.call(lambda part=part: "".join(self._write(part))))  # type: ignore[misc]
            if len(part) == _SLICE:
                await asyncio.sleep(0)  # let other tasks run
        return "".join(texts)

    async def keep(self) -> None:
        if self._keep is not None:
            await self.call(self.writer.whole)
            await self._keep(self.writer)

    async def whole(self) -> bytes:
        def write() -> bytes:
            return msgspec.json.encode(self.writer.whole())

        if self._thread is None and self._tokens > _SMALL_ANSWER:
            return await asyncio.to_thread(write)
        return await self.call(write)

    async def call(self, work: Callable[[], _Result]) -> _Result:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _write(self, batch: EventBatch) -> Iterator[str]:
        for index, event in batch:
            match event:
                case Outcome():
                    self._tokens += len(event.delta.tokens)
                    yield self.writer.add_progress(index, event) + self.writer.add(index, event.delta)
                case Progress():
                    yield self.writer.add_progress(index, event)
                case Delta():
                    self._tokens += len(event.tokens)
                    yield self.writer.add(index, event)
