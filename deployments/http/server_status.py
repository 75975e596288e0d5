"""Current state of the server for operators: requests, totals of endpoints, load of replicas."""

from collections.abc import Mapping
from dataclasses import asdict

from msgspec import structs
from pydantic import BaseModel

from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report
from deployments.configuration.roles import roles_in
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.scaling.controller import Placement


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


class EndpointStatus(BaseModel):
    """Status of one endpoint."""

    name: str
    target: str
    drafter: str | None
    ready: bool
    through_text: dict[str, str]  # how other tokens fit the target's, by model
    totals: Totals


class Adaptation(BaseModel, frozen=True):
    """What online adaptation has done for a drafter. Acceptance: on recent texts that it did not learn."""

    updates: int  # weights published since the replica's start
    texts: int  # on which acceptance was measured last; 0: not yet
    acceptance_before: float | None  # share of their tokens that the drafter's files would have drafted
    acceptance_after: float | None  # share that its present weights would have drafted


class ModelReplicas(BaseModel):
    """How many replicas a model has."""

    model: str
    wanted: int
    running: int
    reason: str | None  # why fewer run than are wanted


class ReplicaLoad(BaseModel, frozen=True):
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


def server_status(
    service: Service, placements: Mapping[str, Placement], *, version: str, uptime_s: float
) -> ServerStatus:
    """Build the current status. placements: by model."""
    waiting, running = service.admission.counts()
    servable = service.servable_models()
    endpoints = [_endpoint(service, name, served, servable) for name, served in service.endpoints.items()]
    return ServerStatus(
        status="ready" if any(endpoint.ready for endpoint in endpoints) else "loading",
        version=version,
        uptime_s=round(uptime_s, 3),
        requests=RequestCounts(running=running.total(), waiting=waiting.total(), max=service.max_requests),
        answer_cache=_answer_cache(service) if service.cache.is_enabled else None,
        endpoints=endpoints,
        models=[ModelReplicas(model=model, **asdict(placement)) for model, placement in placements.items()],
        replicas=replica_loads(service),
    )


def replica_loads(service: Service) -> list[ReplicaLoad]:
    """Load of every live replica."""
    roles = roles_in([served.config for served in service.endpoints.values()])
    return [_replica(address, report, role=roles[address.model]) for address, report in service.replicas()]


def _endpoint(service: Service, name: str, served: ServedEndpoint, servable: set[str]) -> EndpointStatus:
    endpoint, statistics = served.endpoint, asdict(service.metrics.statistics(name))
    prompt_tokens = service.metrics.prompt_tokens(name)
    totals = Totals(
        requests=service.metrics.requests(name),
        tokens=statistics.pop("committed"),
        prompt_tokens=prompt_tokens,
        cache_hit_rate=_rate(statistics["cached"], prompt_tokens),
        **statistics,
    )
    return EndpointStatus(
        name=name,
        target=endpoint.target,
        drafter=endpoint.drafter,
        ready=served.is_ready(servable),
        through_text=served.token_reports(),
        totals=totals,
    )


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


def _replica(address: ReplicaAddress, report: Report | None, *, role: str) -> ReplicaLoad:
    latest = report or Report(active=0, waiting=0, slots=0, request_ids=[])
    is_target = report is not None and role != "drafter"
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
    )
