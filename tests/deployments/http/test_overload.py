"""Twenty times as many requests as can be answered: the metrics say what the clients saw."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.registry import Collector
from starlette.types import Message

from actors.coordinator.request import Delta, Request
from benchmarks.serving.client import Exchange
from benchmarks.serving.http_load import Agreement, MetricsMeter, Pair
from deployments.admission.bounds import Limits
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.head import REQUEST_START, arrival_header
from deployments.http.live_metrics import own_metrics
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.support import virtual_time

SLOTS, READY = 4, 2
ANSWER_S, TOKENS = 0.16, 8
TOLERANCE = 0.01
BODY = json.dumps({"model": "consort", "prompt": "x", "max_tokens": TOKENS, "stream": True, "seed": 1}).encode()


class SteppingCoordinator(FakeCoordinator):
    """Sends an answer's deltas one after the other, as targets do."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        deltas, loop = answer(request), asyncio.get_running_loop()
        for index, delta in enumerate(deltas, start=1):
            loop.call_later(ANSWER_S * index / len(deltas), sink, delta)


async def ask(app: FastAPI, headers: list[tuple[bytes, bytes]] | None = None) -> Exchange:
    """Send a request without a server between, and note when its answer's parts come."""
    began_s = time.monotonic()
    first_s: float | None = None
    status, parts = 0, list[bytes]()
    messages = iter([{"type": "http.request", "body": BODY, "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        return message if message is not None else await asyncio.Future()

    async def send(message: Message) -> None:
        nonlocal first_s, status
        status = message.get("status", status)
        if message.get("body"):
            first_s = first_s or time.monotonic()
            parts.append(message["body"])

    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json"), *(headers or [])], "http_version": "1.1"}
    await app(scope, receive, send)
    return Exchange(began_s, time.monotonic(), first_s, status, None, b"".join(parts))


class Families(Collector):
    """A service's own metrics as a registry reads them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Any:
        return own_metrics(self._service)


async def overload(endpoints: dict[str, ServedEndpoint], *, times: float, seconds: float) -> tuple[Agreement, int]:
    """Run an open loop at a multiple of what the slots can answer. Return the agreement and the failed requests."""
    coordinator: Any = SteppingCoordinator()
    coordinator.slots = SLOTS
    limits = Limits(running={"target": SLOTS}, max_requests=60)
    service = Service(endpoints, coordinator, limits=limits)
    app, families = make_api(service), Families(service)
    await ask(app)  # what is made once
    meter = MetricsMeter(lambda: generate_latest(families).decode())
    count = round(times * seconds * (SLOTS + READY) / ANSWER_S)
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Exchange]]()
    began_s = loop.time()
    for index in range(count):
        await asyncio.sleep(max(0.0, began_s + seconds * index / count - loop.time()))
        tasks.append(asyncio.create_task(ask(app)))
    exchanges = await asyncio.gather(*tasks)
    failed = sum(exchange.status not in (200, 429) for exchange in exchanges)
    return meter.compare(exchanges), failed


def test_refusals_and_queue_time_in_the_metrics_are_what_clients_saw(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement, failed = virtual_time.run(overload(endpoints, times=20, seconds=2), monkeypatch)
    assert failed == 0
    assert agreement.refused.seen > 5 * agreement.answered.seen > 0
    for name in ("requests", "refused", "answered"):
        assert agreement.pairs()[name].error == 0, (name, agreement)
    for name in ("queue_s", "first_token_s", "whole_s"):
        assert agreement.pairs()[name].error <= TOLERANCE, (name, agreement)


@pytest.mark.parametrize(
    ("header", "least_s"), [("ago", 5.0), ("t=1", 0.0), ("ahead", 0.0), ("t=nonsense", 0.0), ("t=nan", 0.0)]
)
def test_time_in_the_proxy_counts(endpoints: dict[str, ServedEndpoint], header: str, least_s: float) -> None:
    value = {"ago": arrival_header(time.time() - 5), "ahead": arrival_header(time.time() + 5)}.get(header, header)

    async def run() -> Agreement:
        coordinator: Any = SteppingCoordinator()
        service = Service(endpoints, coordinator)
        meter = MetricsMeter(lambda: generate_latest(Families(service)).decode())
        exchange = await ask(make_api(service), [(REQUEST_START.encode(), value.encode())])
        return meter.compare([exchange])

    agreement = asyncio.run(run())
    for pair in (agreement.queue_s, agreement.first_token_s, agreement.whole_s):
        assert least_s <= pair.told < least_s + 3


def test_an_error_is_a_share_of_what_was_seen() -> None:
    assert Pair(200, 198).error == pytest.approx(0.01)
    assert Pair(0, 0).error == 0
    assert Pair(0, 1).error == 1
