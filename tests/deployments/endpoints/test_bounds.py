"""Bounds of log-probabilities over all answers and prompts of a request."""

from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.apis.choices import Answer
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator

PROMPT = {"model": "consort", "prompt": [7] * 10, "max_tokens": 4}
CHAT = {"model": "consort", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def client() -> TestClient:
    loaded = load_endpoints(load_config(TINY_CONFIG))
    endpoints = {
        name: replace(served, bounds=replace(served.bounds, max_logprobs=5, total=100))
        for name, served in loaded.items()
    }
    coordinator: Any = FakeCoordinator()
    return TestClient(make_api(Service(endpoints, coordinator)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"prompt_logprobs": 5, "n": 2}, "prompt_logprobs"),
        ({"prompt": [[7] * 10, [8] * 10], "prompt_logprobs": 5}, "prompt_logprobs"),
        ({"logprobs": 4, "n": 6}, "logprobs"),
        ({"prompt_logprobs": 5, "logprobs": 5, "max_tokens": 7}, "logprobs"),
        ({"return_token_details": True, "max_tokens": 101}, "logprobs"),
    ],
)
def test_too_many_are_refused_with_what_to_change(client: TestClient, fields: dict[str, Any], field: str) -> None:
    reply = client.post("/v1/completions", json={**PROMPT, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    message = reply.json()["error"]["message"]
    assert "(http.max_logprobs)" in message or "at most 100 are allowed" in message


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 5, "n": 4}, {"prompt_logprobs": 5, "logprobs": 5, "max_tokens": 6}, {"n": 50, "max_tokens": 50}],
)
def test_as_many_as_there_may_be_are_told(client: TestClient, fields: dict[str, Any]) -> None:
    reply = client.post("/v1/completions", json={**PROMPT, **fields})
    assert reply.status_code == 200, reply.text
    Answer.model_validate(reply.json())


def test_without_a_limit_the_answer_gets_as_long_as_the_budget_allows(client: TestClient) -> None:
    reply = client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 4}).json()
    assert reply["usage"]["completion_tokens"] == 20


def test_all_choices_have_the_prompts_log_probabilities(client: TestClient) -> None:
    asked = {**PROMPT, "prompt": [[7, 8, 9], [10, 11]], "n": 2, "prompt_logprobs": 1}
    logprobs = [choice["prompt_logprobs"] for choice in client.post("/v1/completions", json=asked).json()["choices"]]
    assert logprobs[0] == logprobs[1] != logprobs[2] == logprobs[3]
    assert [len(prompt) for prompt in logprobs] == [3, 3, 2, 2]
    assert set(logprobs[0][1]) == {"8", "6"}
