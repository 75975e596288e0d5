"""Bounds of log-probabilities over all answers and prompts, and parameters that forbid every token."""

import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from deployments.apis.choices import Answer
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.bounds import check_feasible
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.support.properties import repeatable

PROMPT = {"model": "consort", "prompt": [7] * 10, "max_tokens": 4}
CHAT = {"model": "consort", "messages": [{"role": "user", "content": "x"}]}
VOCAB = 5
some = st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple)


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


def wrong_field(params: SamplingParams) -> str | None:
    """Reference that builds sets of all tokens."""
    allowed = set(params.allowed_token_ids or range(VOCAB)) - set(params.suppress_tokens)
    allowed -= {word[0] for word in params.bad_words_ids if len(word) == 1}
    if not allowed:
        return "allowed_token_ids" if params.allowed_token_ids else "suppress_tokens"
    if params.forced_bos_token_id is None and not allowed - set(params.begin_suppress_tokens):
        return "begin_suppress_tokens"
    return "min_tokens" if params.min_tokens and not allowed - set(params.end_token_ids) else None


@repeatable
@given(some, some, some, some, st.lists(some.filter(len), max_size=3).map(tuple), st.booleans(), st.integers(0, 1))
def test_it_names_the_field_that_leaves_nothing(
    allowed: tuple[int, ...],
    suppressed: tuple[int, ...],
    at_first: tuple[int, ...],
    ends: tuple[int, ...],
    words: tuple[tuple[int, ...], ...],
    forced: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        max_tokens=4,
        allowed_token_ids=allowed,
        suppress_tokens=suppressed,
        begin_suppress_tokens=at_first,
        bad_words_ids=words,
        forced_bos_token_id=1 if forced else None,
        eos_token_ids=(2, VOCAB + 3),
        stop_token_ids=ends,
        min_tokens=min_tokens,
    )
    wrong = wrong_field(params)
    with pytest.raises(InvalidRequestError) if wrong else nullcontext() as caught:
        check_feasible(params, VOCAB)
    assert (caught.value.field if caught else None) == wrong


def test_the_size_of_the_vocabulary_does_not_matter() -> None:
    params = SamplingParams(max_tokens=4, min_tokens=1, eos_token_ids=(2,), begin_suppress_tokens=(3,))
    tracemalloc.start()
    check_feasible(params, 262_144)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20_000


def test_what_choices_and_prompts_share_is_made_and_checked_once(
    endpoints: dict[str, ServedEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    sampling = CompletionRequest.sampling

    def count(self: CompletionRequest, **options: Any) -> SamplingParams:
        made.append(options["max_tokens"])
        return sampling(self, **options)

    monkeypatch.setattr(CompletionRequest, "sampling", count)
    body = CompletionRequest(model="consort", prompt=["One", "Two words"], n=8, allowed_token_ids=[*range(6, 2000)])
    requests = endpoints["consort"].prepare(body, seed=3)
    assert len(requests) == len({request.request_id for request in requests}) == 16
    assert [request.params.seed for request in requests[:8]] == [request.params.seed for request in requests[8:]]
    assert len({request.params.seed for request in requests}) == 8
    assert made == [16]
    assert len({id(request.params.allowed_token_ids) for request in requests}) == 1
