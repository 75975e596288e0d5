"""The HTTP application over a `Service`, with the routes that make text or tokens. Knows nothing of Ray."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from actors.coordinator import request as actors_request
from decoding.errors import ConsortError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.chat.writer import ChatWriter
from deployments.apis.choices import Answer
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.completions.writer import CompletionWriter
from deployments.apis.decoder import TokenDecoder
from deployments.apis.errors import ErrorBody, install_error_handlers
from deployments.apis.messages.request import CountTokensRequest, MessagesRequest, TokenCount
from deployments.apis.messages.writer import MessagesWriter
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.responses.writer import ResponsesWriter
from deployments.apis.resumable import LAST_EVENT_ID, ResumableWriter
from deployments.apis.writer import AnswerIdentity, Writer
from deployments.configuration.api_keys import KeyRing
from deployments.endpoints.bounds import count_reported_tokens
from deployments.endpoints.resumption import last_event, may_resume
from deployments.endpoints.service import EventBatch, Service, answer_events
from deployments.fields.generation import GenerationRequest
from deployments.fields.prompts import (
    CompressedPrompt,
    CompressRequest,
    Detokenization,
    DetokenizeRequest,
    Tokenization,
    TokenizeRequest,
)
from deployments.fields.strict import MAX_BODY_BYTES
from deployments.http.adapter_routes import Share, add_adapter_routes, share_with_nobody
from deployments.http.base_urls import BaseUrls, base_url_names, resolve_model
from deployments.http.bodies import SmallBodyRoute, large_body_route
from deployments.http.drain import Drain, DrainMiddleware
from deployments.http.middleware.announcer import Announcer, AnnouncerMiddleware
from deployments.http.middleware.anthropic_errors import AnthropicErrors
from deployments.http.middleware.early_refusal import EarlyRefusal
from deployments.http.middleware.gate import Gate
from deployments.http.middleware.hosts import HostCheck
from deployments.http.middleware.origins import cors_options
from deployments.http.middleware.outcomes import OutcomeMiddleware
from deployments.http.page import add_page
from deployments.http.rendering import Renderer
from deployments.http.status_routes import (
    AskOthers,
    AskPlacements,
    add_status_routes,
    ask_nobody,
    no_placements,
)

_MOST_REPORTED_TOKENS = 2000  # answers that report more are written in a thread
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}
_EVENT = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("event", "data")},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}  # the schema is that of one event
_ANSWERS = {**_ERRORS, 200: {"model": Answer, "content": _STREAM}}
_RESPONSES = {**_ERRORS, 200: {"content": {"application/json": {"schema": {"type": "object"}}, **_STREAM}}}
_logger = logging.getLogger(__name__)


_Body = TypeVar("_Body", bound=GenerationRequest, contravariant=True)


class _MakeWriter(Protocol[_Body]):
    def __call__(
        self,
        body: _Body,
        requests: list[actors_request.Request],
        decoder: TokenDecoder,
        *,
        identity: AnswerIdentity,
    ) -> Writer: ...


def make_api(
    service: Service,
    *,
    keys: KeyRing | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    add_request_id: bool = True,
    cors_origins: Sequence[str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    ask_others: AskOthers = ask_nobody,
    ask_placements: AskPlacements = no_placements,
    drain: Drain | None = None,
    share_adapters: Share = share_with_nobody,
    announcer: Announcer | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        keys: None: no key is needed.
        add_request_id: whether to set `X-Request-Id` in responses; false if a proxy does it.
        cors_origins: pages that may use the server; None: those from this machine.
        allowed_hosts: names by which it may be asked; None: any.
        ask_others: returns the metrics of other coordinators, which /metrics shows too.
        ask_placements: returns how many replicas each model should have and has.
        drain: by which the server is told to stop; None: it stops at once.
        share_adapters: tells other coordinators which adapters were loaded or unloaded here.
        announcer: tells the proxy how many requests it may pass on; None: all.
    """
    api = FastAPI(title="Consort", description="Language models that play together.")
    api.router.route_class = SmallBodyRoute
    drain = drain or Drain()
    # Middleware that is added last runs first.
    api.add_middleware(
        EarlyRefusal, enter=service.enter, check_bounds=service.check_bounds, max_body_bytes=max_body_bytes
    )
    if service.tracer is not None:
        from deployments.http.middleware.tracing import TracingMiddleware

        api.add_middleware(TracingMiddleware, tracer=service.tracer)
    api.add_middleware(DrainMiddleware, drain=drain)
    kinds = {name: served.config.kind or "plain" for name, served in service.endpoints.items()}
    api.add_middleware(BaseUrls, names=base_url_names(kinds))
    api.add_middleware(Gate, keys=keys or KeyRing(()), max_body_bytes=max_body_bytes, add_request_id=add_request_id)
    api.add_middleware(OutcomeMiddleware, record=service.metrics.record_outcome, endpoints=service.endpoints)
    api.add_middleware(AnthropicErrors)
    api.add_middleware(CORSMiddleware, **cors_options(cors_origins))
    if allowed_hosts is not None:
        api.add_middleware(HostCheck, allowed=allowed_hosts)
    if announcer is not None:
        api.add_middleware(AnnouncerMiddleware, announcer=announcer)
    install_error_handlers(api)
    add_status_routes(api, service, ask_others, ask_placements, drain)
    add_adapter_routes(api, service.adapters, share_adapters)
    add_page(api)
    _refuse_embeddings(api)
    large = APIRouter(route_class=large_body_route(max_body_bytes))
    _add_answer_routes(large, service)
    _add_token_routes(large, service)
    api.include_router(large)
    return api


def _add_answer_routes(router: APIRouter, service: Service) -> None:
    """Add the routes that make text."""
    rendering = ThreadPoolExecutor(1, thread_name_prefix="rendering")

    @router.post("/v1/completions", responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _answer(service, request, body, CompletionWriter, rendering)

    @router.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await _answer(service, request, body, ChatWriter, rendering)

    @router.post("/v1/responses", responses=_RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer in a conversation, by OpenAI's newer API."""
        return await _answer(service, request, body, ResponsesWriter, rendering)

    @router.post("/v1/messages", responses=_RESPONSES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer in a conversation, by Anthropic's API."""
        return await _answer(service, request, body, MessagesWriter, rendering)


def _add_token_routes(router: APIRouter, service: Service) -> None:
    """Add the routes that count, convert or shorten prompts."""

    @router.post("/v1/messages/count_tokens", responses=_ERRORS, response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """How many tokens a conversation has, by Anthropic's API."""
        body.model = resolve_model(body.model, request)
        return _json(await service.count_tokens(body, key=request.state.key))

    @router.post("/tokenize", responses=_ERRORS, response_model=Tokenization)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """A text's or a conversation's token ids."""
        return _json(await service.tokenize(body, key=request.state.key))

    @router.post("/compress", responses=_ERRORS, response_model=CompressedPrompt)
    async def compress(body: CompressRequest, request: Request) -> Response:
        """A text or a conversation, shortened."""
        return _json(await service.compress(body, key=request.state.key))

    @router.post("/detokenize", responses=_ERRORS, response_model=Detokenization)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        return _json(await service.detokenize(body, key=request.state.key))


def _refuse_embeddings(api: FastAPI) -> None:
    """Add a route that says why there are no embeddings."""

    @api.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> None:
        raise HTTPException(HTTPStatus.NOT_FOUND, "Consort serves no embeddings; ask a server with an embedding model")


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _answer(
    service: Service, request: Request, body: _Body, make_writer: _MakeWriter[_Body], rendering: ThreadPoolExecutor
) -> Response:
    """Respond with a whole answer or a stream. Errors before a stream's first delta keep their HTTP status."""
    body.model = resolve_model(body.model, request)
    served = service.endpoint(body.model)
    request.state.endpoint = served.name
    request.state.ignored = served.ignored_fields(body)
    last_id = request.headers.get(LAST_EVENT_ID)
    resumable = last_id is not None and may_resume(body, served)
    after = last_event(last_id, body, resumable=resumable)
    identity = AnswerIdentity.new(body.seed_or_new()) if after is None else after.identity
    requests = await service.prepare(body, seed=identity.seed, key=request.state.key)

    def make() -> Writer:
        writer = make_writer(body, requests, served.token_decoder, identity=identity)
        return ResumableWriter(writer, identity, len(requests), after) if resumable else writer

    if request.state.large or count_reported_tokens(body, requests) > _MOST_REPORTED_TOKENS:
        writer = await asyncio.get_running_loop().run_in_executor(rendering, make)
        renderer = Renderer(writer, rendering)
    else:
        renderer = Renderer(make(), None)
    headers = service.cache_headers(requests)
    state = request.state
    state.leave()  # counted as submitted from here
    priority = body.priority or 0
    batches = answer_events(
        *(service, served, requests),
        key=state.key,
        priority=priority,
        arrived_s=state.arrived_s,
        streamed=bool(body.stream),
    )
    if not body.stream:
        async with aclosing(batches):
            async for batch in batches:
                await renderer.add(batch)
        return Response(await renderer.whole(), media_type="application/json", headers=headers)
    first = await anext(batches)
    return StreamingResponse(
        _events(request, first, batches, renderer), media_type="text/event-stream", headers=_SSE_HEADERS | headers
    )


async def _events(
    request: Request, first: EventBatch, rest: AsyncGenerator[EventBatch, None], renderer: Renderer
) -> AsyncGenerator[str, None]:
    """Server-sent events of an answer. An error in mid-stream becomes the last event."""
    async with aclosing(rest):
        try:
            yield await renderer.begin() + await renderer.add(first)
            async for batch in rest:
                yield await renderer.add(batch)
        except Exception as error:
            if not isinstance(error, ConsortError):
                _logger.exception("a stream failed")
            request.state.error = error
            yield await renderer.fail(error)
            return
        yield await renderer.end()
