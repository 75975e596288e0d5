"""Routes about the server: endpoints, health, version, metrics."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from statistics import mean

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from pydantic import BaseModel

from actors.wire.messages import ReplicaAddress, Report
from decoding.drafts.draft import ProposerName
from deployments.apis.errors import ErrorBody
from deployments.configuration.roles import roles_in
from deployments.endpoints.chat_template import ToolPlace
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.endpoints.templates import TemplateList
from deployments.http.live_metrics import exposition, own_metrics, shared_metrics
from deployments.http.middleware import Drain
from deployments.scaling.placement import Placement, Restart


class RequestCounts(BaseModel):
    """Requests of the whole server."""

    running: int
    waiting: int
    max: int  # bound of both together


class Totals(BaseModel):
    """Totals of an endpoint since the server's start, running requests included."""

    requests: int
    tokens: int  # of answers
    steps: int  # of the target
    drafted: int
    accepted: int
    missed: int  # steps that rejected a draft
    hits: int  # of these, steps after which an alternative draft was ready
    prompt_tokens: int  # of prompts that were computed or cached
    cached: int  # of these, tokens whose KV pages were there already
    cache_hit_rate: float  # cached / prompt_tokens


class AnswerCache(BaseModel):
    """The cache of whole answers."""

    tokens: int  # of prompts and answers
    max_tokens: int
    answers: int
    queries: int
    hits: int
    hit_rate: float  # hits / queries


class ProposerStatus(BaseModel):
    """What a proposer did for an endpoint since the server's start."""

    name: str
    drafted: int
    accepted: int
    acceptance_rate: float | None  # accepted / drafted; null: it drafted nothing
    time_share: float | None  # of its target's time with requests, what it took; null: not reported


class EndpointStatus(BaseModel):
    """Status of one endpoint."""

    name: str
    target: str
    drafter: str | None
    ready: bool
    through_text: dict[str, str]  # how other tokens fit the target's, by model
    running: int
    waiting: int
    predicted_wait_s: float  # of a request that comes now; 0 while the speed is unknown, too
    proposers: list[ProposerStatus]
    totals: Totals


class Adaptation(BaseModel):
    """What online adaptation has done for a drafter. Acceptance: on recent texts that it did not learn."""

    updates: int  # weights published since the replica's start
    texts: int  # on which acceptance was measured last; 0: not yet
    acceptance_before: float | None  # share of their tokens that the drafter's files would have drafted
    acceptance_after: float | None  # share that its present weights would have drafted


class PresentWeights(BaseModel):
    """What a replica has loaded, of a model with `weights_at_run_time`."""

    version: str  # as answers name it
    asleep: bool  # whether it holds none until POST /v1/wake
    error: str | None  # why it could not load what came next, or can't sleep


class ModelReplicas(BaseModel):
    """How many replicas a model has."""

    model: str
    wanted: int
    running: int
    starting: int  # with room on a node
    unplaceable: int
    reason: str | None  # why fewer run than are wanted
    last_restart: Restart | None  # null: none, as far as Ray remembers


class ReplicaLoad(BaseModel):
    """Load of one replica by its latest report, up to a second old."""

    name: str
    model: str
    role: str
    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one, or for KV pages
    slots: int
    kv_usage: float  # share of the KV pages that requests hold
    drafting: bool | None  # whether a target wants drafts now, or rests as plain decoding is faster; null for drafters
    speculation_gain: float | None  # a target's speed with drafts over its speed without, by trials; null: not known
    adaptation: Adaptation | None  # null for all but drafters that adapt
    weights: PresentWeights | None  # null where they stay


class ServerStatus(BaseModel):
    """Response of GET /v1/status."""

    status: str
    version: str
    uptime_s: float
    requests: RequestCounts
    answer_cache: AnswerCache | None  # null: off
    endpoints: list[EndpointStatus]
    models: list[ModelReplicas]  # empty while Serve's controller does not answer
    replicas: list[ReplicaLoad]


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
    tools: ToolPlace | None  # whose chat template has a place for them; null: it takes no tools
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


AskOthers = Callable[[], Awaitable[list[list[Metric]]]]
AskPlacements = Callable[[], Awaitable[Mapping[str, Placement]]]  # by model


def add_status_routes(
    api: FastAPI, service: Service, drain: Drain, ask_others: AskOthers | None, ask_placements: AskPlacements | None
) -> None:
    """Add /health, /ready, /version, /metrics, /v1/status and /v1/models."""
    created, began_s = int(time.time()), time.monotonic()

    async def placements() -> Mapping[str, Placement]:
        return {} if ask_placements is None else await ask_placements()

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
        return _status(service, await placements(), uptime_s=time.monotonic() - began_s)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics of all coordinators in Prometheus' format, under vLLM's names."""
        placed = await placements()
        own = [shared_metrics(service, placed), own_metrics(service)]
        others = [] if ask_others is None else await ask_others()
        return Response(exposition([*own, *others]), media_type=CONTENT_TYPE_LATEST)

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


def _status(service: Service, placements: Mapping[str, Placement], *, uptime_s: float) -> ServerStatus:
    coordinator, (waiting, running) = service.coordinator, service.admission.counts()
    servable, asleep = service.servable_models(), coordinator.sleeping()
    endpoints = [
        _endpoint(service, served, servable, running=running[name], waiting=waiting[name])
        for name, served in service.endpoints.items()
    ]
    roles = roles_in([served.config for served in service.endpoints.values()])
    return ServerStatus(
        status="ready" if any(endpoint.ready for endpoint in endpoints) else "asleep" if asleep else "loading",
        version=_version(),
        uptime_s=round(uptime_s, 3),
        requests=RequestCounts(running=running.total(), waiting=waiting.total(), max=service.limits.max_requests),
        answer_cache=_answer_cache(service) if service.cache.is_enabled else None,
        endpoints=endpoints,
        models=[ModelReplicas(model=model, **asdict(placement)) for model, placement in placements.items()],
        replicas=[
            _replica(address, report, roles[address.model], replaceable=coordinator.weights(address.model) is not None)
            for address, report in coordinator.reports()
        ],
    )


def _endpoint(
    service: Service, served: ServedEndpoint, servable: set[str], *, running: int, waiting: int
) -> EndpointStatus:
    metrics, statistics = service.metrics, asdict(service.metrics.statistics(served.name))
    prompt_tokens = metrics.prompt_tokens[served.name]
    totals = Totals(
        requests=metrics.requests[served.name],
        tokens=statistics.pop("committed"),
        prompt_tokens=prompt_tokens,
        cache_hit_rate=_rate(statistics["cached"], prompt_tokens),
        **statistics,
    )
    return EndpointStatus(
        name=served.name,
        target=served.endpoint.target,
        drafter=served.endpoint.drafter,
        ready=served.is_ready(servable),
        through_text=served.token_reports(),
        running=running,
        waiting=waiting,
        predicted_wait_s=round(service.admission.predicted_wait_s(served.endpoint.target), 3),
        proposers=_proposers(service, served),
        totals=totals,
    )


def _proposers(service: Service, served: ServedEndpoint) -> list[ProposerStatus]:
    statistics = service.metrics.statistics(served.name)
    drafted, accepted = statistics.drafted_by, statistics.accepted_by
    reports = [report for address, report in service.coordinator.reports() if address.model == served.endpoint.target]
    shares = [report.proposer_shares for report in reports if report is not None]
    return [
        ProposerStatus(
            name=name,
            drafted=drafted.get(name, 0),
            accepted=accepted.get(name, 0),
            acceptance_rate=_rate(accepted.get(name, 0), drafted[name]) if drafted.get(name) else None,
            time_share=round(mean(share.get(name, 0.0) for share in shares), 4) if any(shares) else None,
        )
        for name in dict.fromkeys([*served.endpoint.proposers, *drafted])
    ]


def _answer_cache(service: Service) -> AnswerCache:
    cache, metrics = service.cache, service.metrics
    return AnswerCache(
        tokens=cache.tokens,
        max_tokens=cache.max_tokens,
        answers=len(cache),
        queries=metrics.cache_queries,
        hits=metrics.cache_hits,
        hit_rate=_rate(metrics.cache_hits, metrics.cache_queries),
    )


def _rate(hits: int, queries: int) -> float:
    return round(hits / queries, 4) if queries else 0.0


def _replica(address: ReplicaAddress, report: Report | None, role: str, *, replaceable: bool) -> ReplicaLoad:
    latest = report or Report(active=0, waiting=0, slots=0, request_ids=[])
    is_target, state = report is not None and role != "drafter", latest.weights
    weights = PresentWeights(version=state.present.version, asleep=state.asleep, error=state.error or None)
    return ReplicaLoad(
        name=address.name,
        model=address.model,
        role=role,
        running=latest.active,
        waiting=latest.waiting,
        slots=latest.slots,
        kv_usage=round(latest.used_pages / max(latest.pages, 1), 4),
        drafting=latest.drafting if is_target else None,
        speculation_gain=round(latest.speculation_gain, 4) if is_target and latest.speculation_gain != 1 else None,
        adaptation=None if latest.adaptation is None else Adaptation(**structs.asdict(latest.adaptation)),
        weights=weights if replaceable and report is not None else None,
    )


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
        tools=served.encoder.tools,
        context_length=served.context_length,
        max_model_len=served.context_length,
        through_text=served.token_reports(),
        ready=served.is_ready(servable),
    )


def _health(service: Service, enough: Callable[[Iterable[bool]], bool], *, is_stopping: bool = False) -> JSONResponse:
    up = service.coordinator.models()
    models = {model for served in service.endpoints.values() for model in served.config.answering}
    endpoints = [served.endpoint for served in service.endpoints.values()]
    models |= {endpoint.drafter for endpoint in endpoints if endpoint.drafter is not None and not endpoint.colocated}
    ready = enough(served.is_ready(service.live_models()) for served in service.endpoints.values())
    status, ready = ("stopping", False) if is_stopping else ("ready" if ready else "loading", ready)
    report = Health(status=status, models={name: name in up for name in sorted(models)})
    return JSONResponse(report.model_dump(), HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _version() -> str:
    try:
        return version("consort")
    except PackageNotFoundError:  # not installed as a package
        return "unknown"
