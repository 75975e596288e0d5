"""What the server is doing now, for operators: requests, endpoints with their totals, replicas with their load."""

from dataclasses import asdict

from pydantic import BaseModel

from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report
from deployments.configuration.roles import roles_in
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service


class RequestCounts(BaseModel):
    """Of the whole server."""

    running: int
    waiting: int
    max: int  # of both together; more are refused


class Totals(BaseModel):
    """Of an endpoint since the server's start, of requests that run too."""

    requests: int
    tokens: int  # of answers
    steps: int  # of the target
    drafted: int
    accepted: int
    missed: int  # steps that rejected a draft
    hits: int  # of these, those after which another draft was there already


class EndpointStatus(BaseModel):
    """A name that clients ask for."""

    name: str
    target: str
    drafter: str | None
    ready: bool
    through_text: dict[str, str]  # how the tokens of models that have others fit the target's, by model
    totals: Totals


class ReplicaLoad(BaseModel, frozen=True):
    """A copy of a model, as it told last: up to a second ago."""

    name: str
    model: str
    role: str
    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    slots: int
    drafting: bool | None  # of a target: whether it wants drafts now


class ServerStatus(BaseModel):
    """GET /v1/status."""

    status: str
    version: str
    uptime_s: float
    requests: RequestCounts
    endpoints: list[EndpointStatus]
    replicas: list[ReplicaLoad]


def server_status(service: Service, *, version: str, uptime_s: float) -> ServerStatus:
    """The server as it is at this moment."""
    waiting, running = service.admission.counts()
    up = service.ready_models()
    endpoints = [_endpoint(service, name, served, up) for name, served in service.endpoints.items()]
    return ServerStatus(
        status="ready" if any(endpoint.ready for endpoint in endpoints) else "loading",
        version=version,
        uptime_s=round(uptime_s, 3),
        requests=RequestCounts(running=running.total(), waiting=waiting.total(), max=service.max_requests),
        endpoints=endpoints,
        replicas=replica_loads(service),
    )


def replica_loads(service: Service) -> list[ReplicaLoad]:
    """Of the live replicas."""
    roles = roles_in([served.config for served in service.endpoints.values()])
    return [_replica(*told, role=roles[told[0].model]) for told in service.replicas()]


def _endpoint(service: Service, name: str, served: ServedEndpoint, up: set[str]) -> EndpointStatus:
    endpoint, fared = served.endpoint, asdict(service.metrics.statistics(name))
    totals = Totals(requests=service.metrics.requests(name), tokens=fared.pop("committed"), **fared)
    return EndpointStatus(
        name=name,
        target=endpoint.target,
        drafter=endpoint.drafter,
        ready=served.is_ready(up),
        through_text=served.token_reports(),
        totals=totals,
    )


def _replica(address: ReplicaAddress, report: Report | None, *, role: str) -> ReplicaLoad:
    told = report or Report(active=0, waiting=0, slots=0, request_ids=[])
    return ReplicaLoad(
        name=address.name,
        model=address.model,
        role=role,
        running=told.active,
        waiting=told.waiting,
        slots=told.slots,
        drafting=None if report is None or role == "drafter" else told.drafting,
    )
