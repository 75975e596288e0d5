"""The HTTP routes, over a `Service`. Knows nothing of Ray or of how texts are made."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from decoding.errors import ConsortError
from deployments.endpoints import ServedEndpoint
from deployments.errors import ErrorBody, body_of, install_error_handlers
from deployments.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.service import DeltaBatch, Service
from deployments.writers import AnswerWriter, ChatWriter, CompletionWriter

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)


class ModelCard(BaseModel):
    """An endpoint, as GET /v1/models shows it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "consort"
    target: str
    drafter: str | None
    draft_length: int
    context_length: int
    ready: bool


class ModelList(BaseModel):
    """All endpoints."""

    object: str = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Which configured models are up. The server is ready once it can answer for one endpoint."""

    status: str
    models: dict[str, bool]


def make_api(service: Service) -> FastAPI:
    """The application: /v1/models, /v1/completions, /v1/chat/completions and /health."""
    api = FastAPI(title="Consort", description="Language models that play together.")
    install_error_handlers(api)
    created = int(time.time())
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 404, 429, 503)}

    @api.get("/health", responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """200 once an endpoint's target is up, 503 before."""
        report = _health(service)
        ready = report.status == "ready"
        return JSONResponse(report.model_dump(), HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    @api.get("/v1/models")
    async def models() -> ModelList:
        """What `model` may be in a request."""
        ready = service.ready_models()
        return ModelList(data=[_card(served, created, ready) for served in service.endpoints.values()])

    @api.get("/v1/models/{name:path}", responses={404: {"model": ErrorBody}})
    async def model(name: str) -> ModelCard:
        """One endpoint."""
        return _card(service.endpoint(name), created, service.ready_models())

    @api.post("/v1/completions", responses=errors)
    async def completions(body: CompletionRequest) -> Response:
        """Continue a text."""
        return await _answer(service, body, CompletionWriter)

    @api.post("/v1/chat/completions", responses=errors)
    async def chat_completions(body: ChatRequest) -> Response:
        """Answer in a conversation."""
        return await _answer(service, body, ChatWriter)

    return api


async def _answer(service: Service, body: GenerationRequest, writer_class: type[AnswerWriter]) -> Response:
    """The whole answer, or a stream once its first delta is there: until then errors still have their status."""
    seed = body.seed_or_new()
    requests = await service.prepare(body, seed=seed)
    writer = writer_class(body, requests, service.endpoint(body.model).vocabulary, seed=seed)
    batches = service.run(requests)
    if not body.stream:
        async with aclosing(batches):
            async for batch in batches:
                for index, delta in batch:
                    writer.add(index, delta)
        return Response(writer.whole().json_text(), media_type="application/json")
    first = await anext(batches)
    events = _events(first, batches, writer, include_usage=body.include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers=_SSE_HEADERS)


async def _events(
    first: DeltaBatch, rest: AsyncGenerator[DeltaBatch, None], writer: AnswerWriter, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events. An error in mid-stream is one more event, after which the stream ends without [DONE]."""
    async with aclosing(rest):
        try:
            yield _batch_events(first, writer)
            async for batch in rest:
                yield _batch_events(batch, writer)
        except Exception as error:
            if not isinstance(error, ConsortError):
                _logger.exception("a stream failed")
            yield _event(body_of(error).model_dump_json())
            return
        if include_usage:
            yield _event(writer.usage_chunk().json_text())
        yield _event("[DONE]")


def _batch_events(batch: DeltaBatch, writer: AnswerWriter) -> str:
    chunks = (writer.add(index, delta) for index, delta in batch)
    return "".join(_event(chunk.json_text()) for chunk in chunks if chunk is not None)


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _card(served: ServedEndpoint, created: int, ready: set[str]) -> ModelCard:
    endpoint = served.endpoint
    return ModelCard(
        id=endpoint.name,
        created=created,
        target=endpoint.target,
        drafter=endpoint.drafter,
        draft_length=endpoint.draft_length if endpoint.drafter is not None else 0,
        context_length=served.context_length,
        ready=endpoint.target in ready,
    )


def _health(service: Service) -> Health:
    ready = service.ready_models()
    endpoints = [served.endpoint for served in service.endpoints.values()]
    models = {name for endpoint in endpoints for name in (endpoint.target, endpoint.drafter) if name is not None}
    up = any(endpoint.target in ready for endpoint in endpoints)
    return Health(status="ready" if up else "loading", models={name: name in ready for name in sorted(models)})
