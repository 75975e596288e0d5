"""Without room, requests are refused before their bodies are read."""

import asyncio

from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ANYBODY, ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.bodies import EarlyRefusal
from deployments.http.head import WORKING
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator


def test_a_full_server_refuses_whatever_the_body_says(endpoints: dict[str, ServedEndpoint]) -> None:
    service = Service(endpoints, FakeCoordinator(), limits=Limits(max_requests=0))  # type: ignore[arg-type]
    client = TestClient(make_api(service))
    own = "/consort/v1/completions"
    for path in (own, *WORKING):
        reply = client.post(path, content=b"anything")
        assert reply.status_code == 429
        assert reply.headers["Retry-After"] == "1"
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"


def test_where_answers_are_kept_the_body_is_read_first(endpoints: dict[str, ServedEndpoint]) -> None:
    service = Service(endpoints, FakeCoordinator(), limits=Limits(max_requests=0), cached_tokens=10)  # type: ignore[arg-type]
    assert TestClient(make_api(service)).post("/v1/completions", content=b"anything").status_code == 400


def test_a_keys_own_bound_holds(endpoints: dict[str, ServedEndpoint]) -> None:
    keys = KeyRing([ApiKey("bob", digest_of("b"), max_requests=0), ApiKey("eve", digest_of("e"))])
    client = TestClient(make_api(Service(endpoints, FakeCoordinator()), keys=keys))  # type: ignore[arg-type]
    body = {"model": "consort", "prompt": "x"}
    statuses = [
        client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"}).status_code
        for secret in ("b", "e", "x")
    ]
    assert statuses == [429, 200, 401]


def test_the_bodies_of_requests_in_progress_are_bounded() -> None:
    """More than eight bodies of the largest size are refused; small bodies never are."""
    most, statuses = 2**16, list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        statuses.append(200)
        await gate.wait()

    async def refused(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def nothing() -> Message:
        return {"type": "http.request"}

    async def run() -> None:
        def ask(size: int) -> asyncio.Task[None]:
            headers = [(b"content-length", str(size).encode())]
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/tokenize",
                "headers": headers,
                "state": {"key": ANYBODY},
            }
            return asyncio.ensure_future(middleware(scope, nothing, refused))

        tasks = [ask(most) for _ in range(9)] + [ask(100)]
        await asyncio.sleep(0)
        assert sorted(statuses) == [200] * 9 + [429]
        gate.set()
        await asyncio.gather(*tasks)
        await ask(most)
        assert sorted(statuses) == [200] * 10 + [429]

    gate = asyncio.Event()
    middleware = EarlyRefusal(
        app, enter=lambda key, endpoint: lambda: None, check_bounds=lambda key: None, max_body_bytes=most
    )
    asyncio.run(run())


def test_a_body_of_unknown_length_is_charged_only_until_it_is_read() -> None:
    """Clients that send chunked bodies have no `Content-Length`."""
    reading, statuses = asyncio.Event(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        statuses.append(200)
        await reading.wait()

    async def refused(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def body() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def run() -> None:
        state = {"key": ANYBODY}
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": [], "state": state}
        for _ in range(20):
            tasks.append(asyncio.ensure_future(middleware(scope, body, refused)))
            await asyncio.sleep(0)
        reading.set()
        await asyncio.gather(*tasks)

    tasks: list[asyncio.Future[None]] = []
    check = {"enter": lambda key, endpoint: lambda: None, "check_bounds": lambda key: None}
    middleware = EarlyRefusal(app, **check, max_body_bytes=2**16)  # type: ignore[arg-type]
    asyncio.run(run())
    assert statuses == [200] * 20
