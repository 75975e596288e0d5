"""Routes about the server: endpoints, health, version, metrics. Makes no text."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from pydantic import BaseModel

from decoding.drafts.draft import ProposerName
from deployments.apis.errors import ErrorBody
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.endpoints.templates import TemplateList
from deployments.http.drain import Drain
from deployments.http.live_metrics import LiveMetrics, replica_counts
from deployments.http.server_status import ServerStatus, server_status
from deployments.monitoring.exposition import exposition
from deployments.scaling.controller import Placement

AskOthers = Callable[[], Awaitable[list[list[Metric]]]]
AskPlacements = Callable[[], Awaitable[Mapping[str, Placement]]]  # by model


class ModelCard(BaseModel):
    """An endpoint in GET /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "consort"
    root: str  # of an adapter its path, else the target
    parent: str | None  # of an adapter: the endpoint that it belongs to
    kind: str
    target: str
    members: list[str]  # leader first; without members, the target
    strategy: str | None
    drafter: str | None
    ngram: bool
    proposers: list[ProposerName]  # all that draft
    draft_length: int
    verification: str
    context_length: int
    max_model_len: int  # vLLM's name for the same
    through_text: dict[str, str]  # how other tokens fit the target's, by model
    ready: bool


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Whether each configured model is up."""

    status: str
    models: dict[str, bool]


class Version(BaseModel):
    """Response of GET /version."""

    version: str


async def ask_nobody() -> list[list[Metric]]:
    """Return nothing: there is no other coordinator."""
    return []


async def no_placements() -> Mapping[str, Placement]:
    """Return nothing: nobody places replicas."""
    return {}


def add_status_routes(
    api: FastAPI, service: Service, ask_others: AskOthers, ask_placements: AskPlacements, drain: Drain
) -> None:
    """Add /health, /ready, /version, /metrics, /v1/status and /v1/models."""
    created, began_s, live = int(time.time()), time.monotonic(), LiveMetrics(service)

    @api.head("/health", include_in_schema=False)
    @api.get("/health", responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """200 once an endpoint's target is up, 503 before."""
        return _health(service, any)

    @api.head("/ready", include_in_schema=False)
    @api.get("/ready", responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """200 while the targets of all endpoints are up and the server takes requests, else 503."""
        return _health(service, all, is_stopping=drain.has_begun)

    @api.get("/version")
    async def show_version() -> Version:
        """Consort's version."""
        return Version(version=_version())

    @api.get("/v1/status")
    async def status() -> ServerStatus:
        """Requests, totals of endpoints, replicas that are wanted and their load."""
        return server_status(service, await ask_placements(), version=_version(), uptime_s=time.monotonic() - began_s)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics of all coordinators in Prometheus' format, under vLLM's names."""
        placed = replica_counts(await ask_placements())
        parts = [live.shared(), placed, live.own(), *await ask_others()]
        return Response(exposition(parts), media_type=CONTENT_TYPE_LATEST)

    @api.get("/v1/models/", include_in_schema=False)  # else the route of one endpoint takes it
    @api.get("/v1/models")
    async def models(request: Request) -> ModelList:
        """Endpoints that `model` may name; below an endpoint's own base URL, only that endpoint."""
        servable, own = service.servable_models(), getattr(request.state, "endpoint", None)
        listed = [served for name, served in service.endpoints.items() if own in (None, name)]
        return ModelList(data=[_card(served, created, servable) for served in listed])

    @api.get("/v1/templates")
    async def templates() -> TemplateList:
        """Prompt templates that `template` may name."""
        return service.templates.cards()

    @api.get("/v1/models/{name:path}", responses={404: {"model": ErrorBody}})
    async def model(name: str) -> ModelCard:
        """One endpoint."""
        return _card(service.endpoint(name.removesuffix("/")), created, service.servable_models())


def _card(served: ServedEndpoint, created: int, servable: set[str]) -> ModelCard:
    endpoint = served.endpoint
    return ModelCard(
        id=endpoint.name,
        created=created,
        root=endpoint.target if endpoint.adapter is None else endpoint.adapter.path,
        parent=served.parent,
        kind=served.config.kind or "plain",
        target=endpoint.target,
        members=served.config.models,
        strategy=None if served.strategy is None else served.strategy.kind,
        drafter=endpoint.drafter,
        ngram=endpoint.ngram is not None,
        proposers=list(endpoint.proposers),
        draft_length=endpoint.draft_length if endpoint.proposers else 0,
        verification=served.config.verification,
        context_length=served.context_length,
        max_model_len=served.context_length,
        through_text=served.token_reports(),
        ready=served.is_ready(servable),
    )


def _health(service: Service, enough: Callable[[Iterable[bool]], bool], *, is_stopping: bool = False) -> JSONResponse:
    up = service.ready_models()
    models = {model for served in service.endpoints.values() for model in served.config.models}
    endpoints = [served.endpoint for served in service.endpoints.values()]
    models |= {endpoint.drafter for endpoint in endpoints if endpoint.drafter is not None and not endpoint.colocated}
    ready = enough(served.is_ready(service.servable_models()) for served in service.endpoints.values())
    status, ready = ("stopping", False) if is_stopping else ("ready" if ready else "loading", ready)
    report = Health(status=status, models={name: name in up for name in sorted(models)})
    return JSONResponse(report.model_dump(), HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _version() -> str:
    try:
        return version("consort")
    except PackageNotFoundError:  # not installed as a package
        return "unknown"
