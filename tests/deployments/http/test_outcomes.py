"""How requests end, as counted and logged, at the edge of the application."""

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from decoding.errors import DeadlineError, UnavailableError
from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.middleware import OutcomeMiddleware
from deployments.http.routes import make_api
from deployments.monitoring.metrics import Outcome
from deployments.replicas.coordinator import DisconnectMiddleware
from tests.deployments.fake_coordinator import FakeCoordinator

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 4, "seed": 1}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.fixture
def server(endpoints: dict[str, ServedEndpoint], coordinator: Any) -> Iterator[TestClient]:
    """A server with two keys, of which one may do hardly anything."""
    keys = KeyRing([ApiKey("alice", digest_of("a")), ApiKey("bob", digest_of("b"), max_requests=1)])
    with TestClient(make_api(Service(endpoints, coordinator, limits=Limits(8)), keys=keys)) as client:
        yield client


def counts(server: TestClient, name: str) -> dict[str, float]:
    """By the labels that are not the usual ones."""
    prefix = f"consort:requests{name}_total{{"
    text = server.get("/metrics", headers={"Authorization": "Bearer a"}).text
    lines = [line.removeprefix(prefix).split("} ") for line in text.splitlines() if line.startswith(prefix)]
    return {labels.replace('coordinator="coordinator",', ""): float(value) for labels, value in lines}


def test_requests_are_counted_once_by_endpoint_key_and_reason(server: TestClient) -> None:
    for secret, body in (("a", BODY), ("b", {**BODY, "n": 3}), ("a", {**BODY, "temperature": -1}), ("x", BODY)):
        server.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"})
    server.post("/v1/completions", json={**BODY, "model": "concert"}, headers={"Authorization": "Bearer a"})
    assert counts(server, "") == {
        'endpoint="consort",key="alice"': 3,
        'endpoint="consort",key="bob"': 1,
        'endpoint="consort",key=""': 1,
    }
    assert counts(server, "_refused") == {'endpoint="consort",key="bob",reason="key_max_requests"': 1}
    assert counts(server, "_failed") == {
        'endpoint="consort",key="alice",reason="invalid_request"': 2,
        'endpoint="consort",key="",reason="unauthorized"': 1,
    }


class Late(FakeCoordinator):
    """Answers nothing in time."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        last = Delta("", (), Statistics(), error=DeadlineError("timeout_s: too long"))
        threading.Timer(0.3, sink, (last,)).start()


def test_what_clients_see_under_overload_is_what_is_counted(endpoints: dict[str, ServedEndpoint]) -> None:
    """Forty clients at once, room for two, which wait until they expire."""
    coordinator: Any = Late()
    coordinator.slots = 0
    limits = Limits(max_requests=2, running={"target": 1})
    with (
        TestClient(make_api(Service(endpoints, coordinator, limits=limits))) as client,
        ThreadPoolExecutor(40) as pool,
    ):
        body = {**BODY, "timeout_s": 0.3}
        replies = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(40)))
        seen = Counter(reply.status_code for reply in replies)
        refused, failed = counts(client, "_refused"), counts(client, "_failed")
    assert seen[429] >= 30
    assert refused == {'endpoint="consort",key="anybody",reason="max_requests"': seen[429]}
    assert failed == {'endpoint="consort",key="anybody",reason="timeout"': seen[408]}


class Failing(FakeCoordinator):
    """Loses its target after two deltas."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        for text in ("a", "b"):
            sink(Delta(text, [Token(9)], Statistics(steps=1, committed=1)))
        sink(Delta("", (), Statistics(), error=UnavailableError("the target is lost")))


def test_what_was_written_before_an_error_is_sent(endpoints: dict[str, ServedEndpoint]) -> None:
    """Also if both reach the stream at the same time, as they do where streams hold events back."""
    coordinator: Any = Failing()
    with TestClient(make_api(Service(endpoints, coordinator, stream_interval_s=10.0))) as client:
        events = client.post("/v1/completions", json={**BODY, "stream": True}).text.strip().split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
    assert texts == ["a", "b"]
    assert events[-1].startswith("event: error")
    assert "the target is lost" in events[-1]


def outcome_of(
    *messages: Message, error: BaseException | None = None, known: Exception | None = None
) -> list[tuple[str, str, Outcome]]:
    """Return what is recorded of a stream that sends the messages and then raises the error."""
    recorded: list[tuple[str, str, Outcome]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["error"] = known
        for message in messages:
            await send(message)
        if error is not None:
            raise error

    async def send(message: Message) -> None:
        """Do nothing."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    middleware = OutcomeMiddleware(application, record=lambda *seen: recorded.append(seen), endpoints=["consort"])
    scope = {"type": "http", "headers": [], "method": "POST", "path": "/v1/chat/completions"}
    with suppress(ClientDisconnect, ValueError, asyncio.CancelledError):
        asyncio.run(middleware(scope, receive, send))
    return recorded


@pytest.mark.parametrize(
    ("messages", "error", "known", "reason"),
    [
        ([START, CHUNK, LAST], None, None, None),
        ([START, CHUNK], None, None, "aborted"),
        ([START, CHUNK], asyncio.CancelledError(), None, "aborted"),
        ([], asyncio.CancelledError(), None, "aborted"),
        ([START, CHUNK], ClientDisconnect(), None, "aborted"),
        ([START, CHUNK], ValueError("a bug"), None, "internal_error"),
        ([START, CHUNK, LAST], None, UnavailableError("no target"), "unavailable"),
        ([START, CHUNK, LAST], None, DeadlineError("too long"), "timeout"),
    ],
)
def test_a_stream_has_one_outcome(
    messages: list[Message],
    error: BaseException | None,
    known: Exception | None,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert outcome_of(*messages, error=error, known=known) == [("consort", "", Outcome(reason))]
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "consort.access"]
    assert line["outcome"] == reason or (reason is None and line["outcome"] == "answered")


class Silent(FakeCoordinator):
    """Sends the first delta and no other."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        sink(Delta("x", (Token(7),), Statistics(steps=1, committed=1)))


@pytest.mark.parametrize("has_body", [False, True], ids=["in its body", "in the answer"])
def test_a_client_that_ray_says_has_left_leaves_no_traceback(
    has_body: bool, endpoints: dict[str, ServedEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    """Ray cancels the call in which the coordinator waits for the client's next message."""
    coordinator: Any = Silent()
    service = Service(endpoints, coordinator)
    api = make_api(service)
    api.add_middleware(DisconnectMiddleware)
    body: Message = {"type": "http.request", "body": json.dumps(BODY | {"stream": True}).encode(), "more_body": False}
    messages = iter([body] if has_body else [])
    sent: list[Message] = []

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            raise TaskCancelledError
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asyncio.run(api({**scope, "app": api, "http_version": "1.1", "server": ("x", 1)}, receive, send))
    assert caplog.records == []
    assert not [message for message in sent if message.get("status", 200) != 200]
    assert service.admission.counts()[0].total() == service.admission.counts()[1].total() == 0
