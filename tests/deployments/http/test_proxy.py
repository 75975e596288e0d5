"""What clients get from Serve's proxy when a coordinator dies."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from ray.serve._private.utils import call_function_from_import_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http import proxy
from deployments.http.doorkeeper import Doorkeeper
from deployments.http.head import REQUEST_START, seconds_since_arrival
from deployments.http.proxy import CoordinatorLossMiddleware
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.support.waiting import wait_until


def answer(*messages: Message, path: str = "/v1/completions") -> tuple[int, dict[str, str], str]:
    """Return status, headers and body if the application sends these messages and returns, as Serve's does."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    reply = TestClient(CoordinatorLossMiddleware(application, patience_s=0)).post(
        path, headers={"X-Request-Id": "mine"}
    )
    return reply.status_code, dict(reply.headers), reply.text


def start(kind: str) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


def body(text: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


STREAM = start("text/event-stream; charset=utf-8")


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    _, _, text = answer(STREAM, body(b"data: 1\n\n", more=True))
    first, last = text.split("\n\n", 1)
    assert first == "data: 1"
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "unavailable"
    _, _, text = answer(STREAM, path="/v1/responses")
    assert json.loads(text.split("data: ")[1])["type"] == "error"


def test_messages_break_off_in_anthropics_form() -> None:
    begun = b'event: message_start\ndata: {"type": "message_start"}\n\n'
    _, _, text = answer(STREAM, body(begun, more=True), path="/v1/messages")
    name, data = text.removeprefix(begun.decode()).split("\n", 1)
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    assert "coordinator that answered has died" in error["error"]["message"]
    status, headers, text = answer(path="/v1/messages")
    assert (status, headers["x-request-id"]) == (503, "mine")
    assert json.loads(text) == error
    assert int(headers["content-length"]) == len(text)


def test_an_answer_that_never_began_is_a_503() -> None:
    status, headers, text = answer()
    assert (status, headers["x-request-id"]) == (503, "mine")
    assert int(headers["retry-after"]) > 0
    assert json.loads(text)["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    "messages", [[STREAM, body(b"data: [DONE]", more=False)], [start("x"), body(b"y", more=False)]]
)
def test_whole_answers_pass(messages: list[Message]) -> None:
    status, _, text = answer(*messages)
    assert (status, text) == (200, messages[-1]["body"].decode())


def test_serve_finds_it() -> None:
    middlewares = call_function_from_import_path(proxy.CALLBACK)
    assert [middleware.cls for middleware in middlewares] == [CoordinatorLossMiddleware, Doorkeeper]


@contextmanager
def serving(application: ASGIApp) -> Iterator[str]:
    """Serve behind the middleware, by uvicorn in a thread; give the URL."""
    server = uvicorn.Server(uvicorn.Config(CoordinatorLossMiddleware(application), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server listens")
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_connections_idle_time_is_no_wait() -> None:
    waited: list[float] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        waited.append(seconds_since_arrival(Headers(scope=scope), time.time()))
        await send(start("text/plain"))
        await send(body(b"", more=False))

    with serving(application) as url, httpx.Client() as client:
        assert client.get(url).status_code == 200
        time.sleep(2.0)
        assert client.get(url).status_code == 200
    assert max(waited) < 2.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels don't say it")
def test_a_client_waits_since_its_request_reached_the_socket() -> None:
    """While the event loop is blocked, a second client's request lies unread."""
    blocking, waited = threading.Event(), list[float]()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        waited.append(seconds_since_arrival(Headers(scope=scope), time.time()))
        if scope["path"] == "/block":
            blocking.set()
            time.sleep(3.0)  # noqa: ASYNC251 - a busy event loop
        await send(start("text/plain"))
        await send(body(b"", more=False))

    with serving(application) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.get, f"{url}/block")
        assert blocking.wait(10)
        began_s = time.monotonic()
        assert httpx.get(url, headers={REQUEST_START: "t=1"}).status_code == 200
        took_s = time.monotonic() - began_s
        assert first.result(10).status_code == 200
    assert waited[0] < 3.0
    assert 0.3 < waited[1] < took_s + 0.05


class Died(Exception):
    """The coordinator is gone."""


class Mortal:
    """Serve's proxy before coordinators that die, each after that many bytes of its response; −1: before it begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.lives = app, list[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = self.lives.pop(0) if self.lives else 10**9

        async def send_on(message: Message) -> None:
            nonlocal left
            if left < 0:
                raise Died
            body = message.get("body", b"")
            if len(body) > left:
                await send({**message, "body": body[:left], "more_body": True})
                raise Died
            left -= len(body)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except* Died:
            pass


@pytest.fixture
def mortal(endpoints: dict[str, ServedEndpoint]) -> Iterator[tuple[TestClient, Mortal, TestClient]]:
    """A client behind the proxy, the coordinators there, and a client that asks one that never dies."""
    coordinator: Any = FakeCoordinator()
    api = make_api(Service(endpoints, coordinator))
    mortal = Mortal(api)
    with TestClient(CoordinatorLossMiddleware(mortal, pause_s=0)) as client, TestClient(api) as undisturbed:
        yield client, mortal, undisturbed


BODY = {"model": "consort", "prompt": "import os", "max_tokens": 40, "stream": True, "seed": 5}


def texts(reply: str) -> tuple[str, int]:
    """The text that a client puts together, and how often it is told that this is all."""
    data = [line[6:] for line in reply.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in data if line != "[DONE]"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), data.count("[DONE]")


@pytest.mark.parametrize("lives", [[-1], [0], [1], [500], [1000, 900], [2000, -1, 0, 700], [3000]])
def test_another_coordinator_goes_on_unnoticed(mortal: tuple[TestClient, Mortal, TestClient], lives: list[int]) -> None:
    client, coordinators, undisturbed = mortal
    coordinators.lives = lives
    reply = client.post("/v1/completions", json=BODY)
    assert reply.status_code == 200
    assert "event: error" not in reply.text
    assert texts(reply.text) == texts(undisturbed.post("/v1/completions", json=BODY).text)
    assert coordinators.lives == []
    assert "id: " not in reply.text  # some clients take an event for a single line of data


def test_an_answer_that_had_not_begun_is_asked_for_again(mortal: tuple[TestClient, Mortal, TestClient]) -> None:
    client, coordinators, undisturbed = mortal
    coordinators.lives = [-1]
    body = {**BODY, "stream": False}
    reply, expected = client.post("/v1/completions", json=body), undisturbed.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["choices"]) == (200, expected.json()["choices"])


def test_a_stream_that_drew_its_own_seed_goes_on_with_it(mortal: tuple[TestClient, Mortal, TestClient]) -> None:
    client, coordinators, undisturbed = mortal
    coordinators.lives = [1500]
    drawn = {name: value for name, value in BODY.items() if name != "seed"}
    reply = client.post("/v1/completions", json=drawn, headers={"Last-Event-ID": "0"}).text
    seeds = {int(line[4:].split("/")[0].split(".")[2], 16) for line in reply.splitlines() if line.startswith("id: ")}
    (seed,) = seeds
    assert texts(reply) == texts(undisturbed.post("/v1/completions", json={**BODY, "seed": seed}).text)
