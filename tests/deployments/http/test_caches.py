"""Clients see what caches saved them, and are kept apart where they want to be."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator

KEYS = KeyRing(ApiKey(name, digest_of(name), private_cache=name != "open") for name in ("a", "b", "open"))


def ask(client: TestClient, prompt: list[int], **fields: Any) -> int:
    body = {"model": "consort", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_usage_has_the_tokens_of_shared_pages(client: TestClient) -> None:
    prompt = list(range(100, 150))
    assert ask(client, prompt) == 0
    assert ask(client, prompt) == 48
    assert ask(client, [*prompt[:20], *range(200, 240)]) == 16
    assert ask(client, prompt, n=2, temperature=1) == 48
    assert ask(client, prompt, use_beam_search=True, n=2, num_beams=2) == 48
    assert ask(client, prompt, prompt_logprobs=0) == 0


def test_responses_and_streams_have_them_too(client: TestClient) -> None:
    body = {"model": "consort", "prompt": "z" * 100, "max_tokens": 2, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    for _ in range(2):
        text = client.post("/v1/completions", json={**body, **options}).text
    assert '"cached_tokens":0' not in text
    assert '"cached_tokens":' in text


def test_different_salts_share_nothing(client: TestClient) -> None:
    prompt = list(range(300, 340))
    assert ask(client, prompt, cache_salt="red") == 0
    assert ask(client, prompt, cache_salt="blue") == 0
    assert ask(client, prompt) == 0
    assert ask(client, prompt, cache_salt="red") == 32


def test_the_status_and_metrics_have_hit_rates(client: TestClient) -> None:
    prompt = list(range(400, 450))
    for _ in range(3):
        ask(client, prompt)
    (endpoint,) = client.get("/v1/status").json()["endpoints"]
    totals = endpoint["totals"]
    assert totals["cached"] >= 96
    assert totals["cache_hit_rate"] == round(totals["cached"] / totals["prompt_tokens"], 4)
    metrics = client.get("/metrics").text
    (hits,) = (line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total{"))
    assert float(hits.split()[-1]) == totals["cached"]


@pytest.fixture
def keyed(endpoints: dict[str, ServedEndpoint]) -> Iterator[tuple[TestClient, FakeCoordinator]]:
    coordinator: Any = FakeCoordinator()
    service = Service(endpoints, coordinator, limits=Limits(max_requests=8), cached_tokens=1000)
    with TestClient(make_api(service, keys=KEYS)) as client:
        yield client, coordinator


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_with_a_private_cache_share_answers_with_nobody(keyed: tuple[TestClient, FakeCoordinator]) -> None:
    client, coordinator = keyed
    body = {"model": "consort", "prompt": "a", "max_tokens": 2, "temperature": 0}
    cached = {}
    for key in ("a", "b", "open", "a"):
        answer = client.post("/v1/completions", json=body, headers=headers(key))
        cached[key] = answer.headers["X-Consort-Cache"]
    assert cached == {"a": "hit", "b": "miss", "open": "miss"}
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert len({request.cache_salt for request in coordinator.requests}) == 3
    status = client.get("/v1/status", headers=headers("a")).json()["answer_cache"]
    assert (status["queries"], status["hits"], status["hit_rate"], status["answers"]) == (4, 1, 0.25, 3)


def test_a_salt_can_not_be_that_of_a_key() -> None:
    private, shared = ApiKey("a", private_cache=True), ApiKey("b")
    salts = {private.cache_salt(None), private.cache_salt("x"), shared.cache_salt("x"), shared.cache_salt("key a: ")}
    assert len(salts) == 4
    assert shared.cache_salt(None) == ""
