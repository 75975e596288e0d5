"""Read a server's status over HTTP. Must not know how it is shown."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from decoding.errors import UnavailableError
from deployments.client import Client

Document = Mapping[str, Any]
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of an endpoint, since the server's start or the last reading. None: nothing happened."""

    tokens_per_s: float | None
    acceptance_rate: float | None
    acceptance_length: float | None
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """An endpoint's models and rates."""

    name: str
    target: str
    drafter: str | None
    ready: bool
    requests: int | None = None  # since the server's start
    rates: Rates | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A copy of a model."""

    name: str
    model: str
    role: str
    running: int  # requests that hold a slot
    waiting: int  # requests that wait for one
    slots: int
    drafting: bool | None  # target: whether it wants drafts now


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """How many replicas a model should have and has. reason: why fewer run than are wanted."""

    model: str
    wanted: int
    running: int
    reason: str | None

    @property
    def words(self) -> str:
        """The counts and the reason in words."""
        return f"{self.running} of {self.wanted} replicas" + (f", {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a server. None: the server does not report it."""

    url: str
    ready: bool
    models: Mapping[str, bool]  # whether a replica is up
    endpoints: Sequence[EndpointStatus]
    replicas: Sequence[ReplicaStatus] | None = None
    counts: Sequence[ReplicaCount] = ()
    running: int | None = None
    waiting: int | None = None
    version: str | None = None


def wait_for_replicas(
    client: Client, model: str, replicas: int, report: Callable[[str], None], *, timeout_s: float
) -> None:
    """Wait until a model has so many replicas, and report what they wait for whenever that changes.

    Raises:
        UnavailableError: it has not so many in time, or the server does not say.
    """
    ends_at_s, last = time.monotonic() + timeout_s, None
    while True:
        counts = StatusReader(client).read().counts
        count = next((count for count in counts if count.model == model), None)
        if count is not None and count.wanted == count.running == replicas:
            return
        state = "the server does not say how many run" if count is None else count.words
        if time.monotonic() > ends_at_s:
            raise UnavailableError(f"{model}: not {replicas} replica(s) after {timeout_s:g} s: {state}")
        if state != last:
            report(f"{model}: {state}")
        last = state
        time.sleep(_POLL_S)


class StatusReader:
    """Reads a server's status repeatedly. Rates are since the last reading, at first since the server's start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: Document | None = None

    def read(self) -> Status:
        """Read the status; raises UnavailableError if no server answers, InvalidRequestError if the key is wrong."""
        reply = self._client.get("/v1/status")
        if reply.status == HTTPStatus.NOT_FOUND:
            return self._read_without_load()
        document = self._client.checked("/v1/status", reply)
        if self._last is not None and self._last["uptime_s"] >= document["uptime_s"]:
            self._last = None  # the server was restarted
        last, self._last = self._last, document
        return _status(self._client.url, document, last)

    def _read_without_load(self) -> Status:
        """Read the status of a server without /v1/status."""
        health = self._client.get("/health")
        if health.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE) or "models" not in health.document:
            raise UnavailableError(f"{self._client.url} answers, but serves no models: HTTP {health.status}")
        cards = self._client.document("/v1/models")["data"]
        return Status(
            url=self._client.url,
            ready=health.status == HTTPStatus.OK,
            models=health.document["models"],
            endpoints=[EndpointStatus(card["id"], card["target"], card["drafter"], card["ready"]) for card in cards],
        )


def _status(url: str, document: Document, last: Document | None) -> Status:
    replicas = [_replica(replica) for replica in document["replicas"]]
    return Status(
        url=url,
        ready=document["status"] == "ready",
        models=_models(document["endpoints"], {replica.model for replica in replicas}),
        endpoints=[_endpoint(endpoint, document["uptime_s"], last) for endpoint in document["endpoints"]],
        replicas=replicas,
        counts=[ReplicaCount(**count) for count in document.get("models", [])],
        running=document["requests"]["running"],
        waiting=document["requests"]["waiting"],
        version=document["version"],
    )


def _models(endpoints: Sequence[Document], up: set[str]) -> dict[str, bool]:
    named: Iterator[str | None] = (endpoint[role] for endpoint in endpoints for role in ("target", "drafter"))
    return {name: name in up for name in sorted({name for name in named if name is not None})}


def _endpoint(endpoint: Document, uptime_s: float, last: Document | None) -> EndpointStatus:
    before: Document = {}
    elapsed_s = uptime_s
    if last is not None:
        before = next((other["totals"] for other in last["endpoints"] if other["name"] == endpoint["name"]), {})
        elapsed_s -= last["uptime_s"]
    return EndpointStatus(
        endpoint["name"],
        endpoint["target"],
        endpoint["drafter"],
        endpoint["ready"],
        endpoint["totals"]["requests"],
        _rates(endpoint["totals"], before, elapsed_s),
    )


def _rates(totals: Document, before: Document, elapsed_s: float) -> Rates:
    grown = {name: count - before.get(name, 0) for name, count in totals.items()}
    return Rates(
        tokens_per_s=_ratio(grown["tokens"], elapsed_s),
        acceptance_rate=_ratio(grown["accepted"], grown["drafted"]),
        acceptance_length=_ratio(grown["tokens"], grown["steps"]),
        hit_rate=_ratio(grown["hits"], grown["missed"]),
    )


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _replica(replica: Document) -> ReplicaStatus:
    return ReplicaStatus(
        replica["name"],
        replica["model"],
        replica["role"],
        replica["running"],
        replica["waiting"],
        replica["slots"],
        replica["drafting"],
    )
