"""A server that stops: what is in progress ends, what is new goes elsewhere."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
from fastapi.testclient import TestClient

from actors.coordinator.request import Delta, Request
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.middleware import Drain
from deployments.http.routes import Surroundings, make_api
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.deployments.http.test_proxy import serving

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1, "stream": True}
JSON = {"Content-Type": "application/json"}


class Held(FakeCoordinator):
    """Sends the first delta at once, and the others when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        first, *rest = answer(request)
        sink(first)
        self.has_begun.set()
        threading.Thread(target=self._send, args=(rest, sink)).start()

    def _send(self, deltas: list[Delta], sink: Callable[[Delta], None]) -> None:
        assert self.may_end.wait(30)
        for delta in deltas:
            sink(delta)


def begin_drain(client: TestClient, drain: Drain, drain_s: float) -> Future[int]:
    """Begin it in the server's event loop, as the application does."""
    portal = client.portal
    assert portal is not None
    begun = threading.Event()

    async def run() -> int:
        begun.set()
        return await drain.run(drain_s)

    future = portal.start_task_soon(run)
    assert begun.wait(10)
    return future


def test_a_stream_in_flight_ends_whole_and_new_requests_are_sent_away(endpoints: dict[str, ServedEndpoint]) -> None:
    held, drain = Held(), Drain()
    coordinator: Any = held
    with (
        TestClient(make_api(Service(endpoints, coordinator), surroundings=Surroundings(drain=drain))) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = pool.submit(client.post, "/v1/completions", json=BODY)
        assert held.has_begun.wait(10)
        assert client.get("/ready").status_code == 200
        drained = begin_drain(client, drain, 30)
        for path, body in (("/v1/completions", BODY), ("/tokenize", {"model": "consort", "prompt": "x"})):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["error"]["code"] == "unavailable"
        ready = client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "stopping")
        assert client.get("/health").status_code == 200  # it lives
        assert not drained.done()
        held.may_end.set()
        assert drained.result(10) == 0
        assert stream.result(10).text.endswith("data: [DONE]\n\n")
        assert 'reason="unavailable"} 2.0' in client.get("/metrics").text


def test_half_a_request_is_not_waited_for(endpoints: dict[str, ServedEndpoint]) -> None:
    """Its client may send the rest in an hour, or never. What comes then is sent away."""
    drain, coordinator = Drain(), FakeCoordinator()
    fake: Any = coordinator
    sending, may_go_on = threading.Event(), threading.Event()

    def halves() -> Iterator[bytes]:
        text = json.dumps(BODY).encode()
        yield text[:9]
        sending.set()
        assert may_go_on.wait(30)
        yield text[9:]

    with (
        serving(make_api(Service(endpoints, fake), surroundings=Surroundings(drain=drain))) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        half = pool.submit(httpx.post, f"{url}/v1/completions", content=halves(), headers=JSON)
        assert sending.wait(10)
        assert asyncio.run(drain.run(30)) == 0
        may_go_on.set()
        assert half.result(10).status_code == 503


def test_what_does_not_end_in_time_is_told() -> None:
    async def stop() -> int:
        drain = Drain()
        with drain.hold(), drain.hold():
            return await drain.run(0.01)

    assert asyncio.run(stop()) == 2


def test_it_is_known_whether_a_coordinator_has_ever_had_a_request() -> None:
    """One that has not stands by, and is not counted."""
    drain = Drain()
    states = [drain.has_served]
    with drain.hold():
        states.append(drain.has_served)
    assert [*states, drain.has_served] == [False, True, True]
