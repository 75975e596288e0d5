"""The HTTP application over a `Service`: middleware, and the routes that make text or tokens."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from deployments.apis.chat.request import ChatRequest
from deployments.apis.chat.writer import ChatWriter
from deployments.apis.choices import Answer
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.completions.writer import CompletionWriter
from deployments.apis.errors import ErrorBody, install_error_handlers
from deployments.apis.messages.request import CountTokensRequest, MessagesRequest, TokenCount
from deployments.apis.messages.writer import MessagesWriter
from deployments.apis.responses.request import ResponsesRequest
from deployments.apis.responses.writer import ResponsesWriter
from deployments.configuration.api_keys import KeyRing
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.fields.prompts import (
    CompressedPrompt,
    CompressRequest,
    Detokenization,
    DetokenizeRequest,
    Tokenization,
    TokenizeRequest,
)
from deployments.fields.strict import MAX_BODY_BYTES
from deployments.http.admin_routes import Share, add_adapter_routes, add_weights_routes
from deployments.http.announcer import Announcer, AnnouncerMiddleware
from deployments.http.answering import answer
from deployments.http.bodies import EarlyRefusal, SmallBodyRoute, large_body_route
from deployments.http.head import GENERATING, BaseUrls, resolve_model
from deployments.http.middleware import Drain, DrainMiddleware, Gate, HostCheck, OutcomeMiddleware, cors_options
from deployments.http.page import add_page
from deployments.http.response_routes import add_response_routes
from deployments.http.status import AskOthers, AskPlacements, add_status_routes

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)
}
_EVENT = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("event", "data")},
    "required": ["data"],
}
_EMBEDDERS = "ask a server of such models, as Text Embeddings Inference and vLLM are"
_UNSERVED = {  # OpenAI's other routes: what is not here, and what to use
    "/v1/embeddings": f"embeddings; {_EMBEDDERS}",
    "/v1/rerank": f"rerankers; {_EMBEDDERS}",
    "/v1/audio/{kind:path}": "sound; ask a speech server, such as Speaches, or vLLM with Whisper",
    "/v1/images/{kind:path}": "images; ask a server of image models, such as vLLM-Omni or ComfyUI",
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}  # the schema is that of one event
_ANSWERS = {**_ERRORS, 200: {"model": Answer, "content": _STREAM}}
_RESPONSES = {**_ERRORS, 200: {"content": {"application/json": {"schema": {"type": "object"}}, **_STREAM}}}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the application asks, and tells, the proxy, Serve and other coordinators."""

    drain: Drain = field(default_factory=Drain)  # by which the server is told to stop
    announcer: Announcer | None = None  # tells the proxy how many requests it may pass on; None: all
    ask_others: AskOthers | None = None  # returns the metrics of other coordinators
    ask_placements: AskPlacements | None = None  # returns how many replicas each model should have and has
    share_adapters: Share | None = None  # tells others which adapters were loaded or unloaded here


def make_api(
    service: Service,
    *,
    keys: KeyRing | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    add_request_id: bool = True,
    cors_origins: Sequence[str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    surroundings: Surroundings | None = None,
) -> FastAPI:
    """Build the application.

    keys: None: no key is needed.
    add_request_id: whether to set `X-Request-Id` in responses; false if a proxy does it.
    cors_origins: pages that may use the server; None: those from this machine.
    allowed_hosts: names by which it may be asked; None: any.
    surroundings: None: the server is alone.
    """
    api = FastAPI(title="Consort", description="Language models that play together.")
    api.router.route_class = SmallBodyRoute
    surroundings = surroundings or Surroundings()
    # Middleware that is added last runs first.
    api.add_middleware(
        EarlyRefusal, enter=service.enter, check_bounds=service.admission.check_bounds, max_body_bytes=max_body_bytes
    )
    if service.tracer is not None:
        from deployments.monitoring.tracing import TracingMiddleware

        api.add_middleware(TracingMiddleware, tracer=service.tracer, paths=GENERATING)
    api.add_middleware(DrainMiddleware, drain=surroundings.drain)
    kinds = {name: served.config.kind or "plain" for name, served in service.endpoints.items()}
    api.add_middleware(BaseUrls, kinds=kinds)
    api.add_middleware(Gate, keys=keys or KeyRing(()), max_body_bytes=max_body_bytes, add_request_id=add_request_id)
    api.add_middleware(OutcomeMiddleware, record=service.metrics.record_outcome, endpoints=service.endpoints)
    api.add_middleware(CORSMiddleware, **cors_options(cors_origins))
    if allowed_hosts is not None:
        api.add_middleware(HostCheck, allowed=allowed_hosts)
    if surroundings.announcer is not None:
        api.add_middleware(AnnouncerMiddleware, announcer=surroundings.announcer)
    install_error_handlers(api)
    add_status_routes(api, service, surroundings.drain, surroundings.ask_others, surroundings.ask_placements)
    add_adapter_routes(api, service.adapters, surroundings.share_adapters)
    add_response_routes(api, service.conversations)
    add_weights_routes(api, service.weights)
    add_page(api)
    large = APIRouter(route_class=large_body_route(max_body_bytes))
    _add_answer_routes(large, service)
    _add_token_routes(large, service)
    api.include_router(large)

    for path, advice in _UNSERVED.items():
        api.add_api_route(path, _refusal(advice), methods=["POST"], include_in_schema=False)
    return api


def _refusal(advice: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"Consort serves models that write text, and no {advice}")

    return refuse


def _add_answer_routes(router: APIRouter, service: Service) -> None:
    thread = ThreadPoolExecutor(1, thread_name_prefix="rendering")

    @router.post("/v1/completions", responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await answer(service, request, body, CompletionWriter, thread)

    @router.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await answer(service, request, body, ChatWriter, thread)

    @router.post("/v1/responses", responses=_RESPONSES)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer in a conversation, by OpenAI's newer API."""
        key, conversations = request.state.key, service.conversations
        await conversations.resume(body, key)
        keep = partial(conversations.keep, body, key)
        response = await answer(service, request, body, ResponsesWriter, thread, keep)
        if body.store and conversations.store is None:
            request.state.ignored = [*request.state.ignored, "store"]
        return response

    @router.post("/v1/messages", responses=_RESPONSES)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer in a conversation, by Anthropic's API."""
        return await answer(service, request, body, MessagesWriter, thread)


def _add_token_routes(router: APIRouter, service: Service) -> None:
    def endpoint_of(
        body: CountTokensRequest | TokenizeRequest | DetokenizeRequest | CompressRequest, request: Request
    ) -> ServedEndpoint:
        body.model = resolve_model(body.model, request)
        return service.endpoint(body.model)

    @router.post("/v1/messages/count_tokens", responses=_ERRORS, response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """How many tokens a conversation has, by Anthropic's API."""
        return _json(await service.hold(request.state.key, partial(endpoint_of(body, request).count_tokens, body)))

    @router.post("/tokenize", responses=_ERRORS, response_model=Tokenization)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """A text's or a conversation's token ids."""
        return _json(await service.hold(request.state.key, partial(endpoint_of(body, request).tokenize, body)))

    @router.post("/compress", responses=_ERRORS, response_model=CompressedPrompt)
    async def compress(body: CompressRequest, request: Request) -> Response:
        """A text or a conversation, shortened."""
        endpoint_of(body, request)
        return _json(await service.compress(body, key=request.state.key))

    @router.post("/detokenize", responses=_ERRORS, response_model=Detokenization)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        return _json(await service.hold(request.state.key, partial(endpoint_of(body, request).detokenize, body)))


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
