"""The HTTP application, over a `Service`, with its routes that make text or tokens. Knows nothing of Ray."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from actors import request as actors_request
from actors.request import Delta
from decoding.errors import ConsortError
from deployments.answers.responses import Answer
from deployments.answers.responses_writer import ResponsesWriter
from deployments.answers.writer import Writer
from deployments.answers.writers import ChatWriter, CompletionWriter
from deployments.endpoints.answering import EventBatch, answers
from deployments.endpoints.service import Service
from deployments.endpoints.vocabulary import Vocabulary
from deployments.http.base_urls import BaseUrls, base_names, named_model
from deployments.http.errors import ErrorBody, install_error_handlers
from deployments.http.gate import Gate
from deployments.http.keys import KeyRing
from deployments.http.page import add_page
from deployments.http.status_routes import add_status_routes
from deployments.http.turnstile import Turnstile
from deployments.requests.responses_request import ResponsesRequest
from deployments.requests.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.requests.token_requests import Detokenization, DetokenizeRequest, Tokenization, TokenizeRequest
from deployments.strategies.progress import Outcome, Progress

MAX_BODY_BYTES = 16 * 2**20
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}
_EVENT = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("event", "data")},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}  # of each event
_ANSWERS = {**_ERRORS, 200: {"model": Answer, "content": _STREAM}}
_RESPONSES = {**_ERRORS, 200: {"content": {"application/json": {"schema": {"type": "object"}}, **_STREAM}}}
_logger = logging.getLogger(__name__)


_Body = TypeVar("_Body", bound=GenerationRequest, contravariant=True)


class _MakeWriter(Protocol[_Body]):
    def __call__(
        self, body: _Body, requests: list[actors_request.Request], vocabulary: Vocabulary, *, seed: int
    ) -> Writer: ...


def make_api(
    service: Service, *, keys: KeyRing | None = None, max_body_bytes: int = MAX_BODY_BYTES, tell_id: bool = True
) -> FastAPI:
    """The application.

    Args:
        keys: None: anybody may ask.
        tell_id: answers have their `X-Request-Id`; false where somebody further out sees to that.
    """
    api = FastAPI(title="Consort", description="Language models that play together.")
    kinds = {name: served.config.kind or "plain" for name, served in service.endpoints.items()}
    api.add_middleware(Turnstile, check=service.check_room)  # what is added last comes first
    if service.tracer is not None:
        from deployments.http.traced import Traced

        api.add_middleware(Traced, tracer=service.tracer)
    api.add_middleware(BaseUrls, names=base_names(kinds))
    api.add_middleware(Gate, keys=keys or KeyRing(()), max_body_bytes=max_body_bytes, tell_id=tell_id)
    install_error_handlers(api)
    add_status_routes(api, service)
    add_page(api)

    @api.post("/v1/completions", responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _answer(service, request, body, CompletionWriter)

    @api.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await _answer(service, request, body, ChatWriter)

    @api.post("/v1/responses", responses=_RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer in a conversation, by OpenAI's newer API."""
        return await _answer(service, request, body, ResponsesWriter)

    @api.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Tokenization:
        """A text's or a conversation's token ids."""
        return await service.tokenize(body)

    @api.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Detokenization:
        """The text of token ids."""
        return service.detokenize(body)

    return api


async def _answer(service: Service, request: Request, body: _Body, make_writer: _MakeWriter[_Body]) -> Response:
    """The whole answer, or a stream once its first delta is there: until then errors still have their status."""
    body.model = named_model(body.model, request)
    served, seed = service.endpoint(body.model), body.seed_or_new()
    requests = await service.prepare(body, seed=seed)
    writer = make_writer(body, requests, served.vocabulary, seed=seed)
    headers = service.cache_headers(requests)
    state = request.state
    batches = answers(service, served, requests, key=state.key, priority=body.priority or 0, arrived_s=state.arrived_s)
    if not body.stream:
        async with aclosing(batches):
            async for batch in batches:
                _add(batch, writer)
        return JSONResponse(writer.whole(), headers=headers)
    first = await anext(batches)
    return StreamingResponse(
        _events(first, batches, writer), media_type="text/event-stream", headers=_SSE_HEADERS | headers
    )


async def _events(
    first: EventBatch, rest: AsyncGenerator[EventBatch, None], writer: Writer
) -> AsyncGenerator[str, None]:
    """Server-sent events. An error in mid-stream is one more event, after which the stream ends."""
    async with aclosing(rest):
        try:
            yield writer.begin() + _add(first, writer)
            async for batch in rest:
                yield _add(batch, writer)
        except Exception as error:
            if not isinstance(error, ConsortError):
                _logger.exception("a stream failed")
            yield writer.fail(error)
            return
        yield writer.end()


def _add(batch: EventBatch, writer: Writer) -> str:
    return "".join(_write(index, event, writer) for index, event in batch)


def _write(index: int, event: Delta | Progress | Outcome, writer: Writer) -> str:
    match event:
        case Outcome():
            return writer.tell(index, event) + writer.add(index, event.delta)
        case Progress():
            return writer.tell(index, event)
        case _:
            return writer.add(index, event)
