"""The HTTP routes on tiny models: answers and refusals."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from actors.coordinator.loop import Coordinator
from actors.wire.link import LocalExchange
from decoding.errors import UnavailableError
from deployments.admission.bounds import Limits
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.bad_input import CASES, NO_OBJECTS
from tests.deployments.conftest import MAX_REQUESTS
from tests.deployments.fake_coordinator import FakeCoordinator

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 8, "seed": 1}
CHAT_BODY = {"model": "consort", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}


@pytest.fixture(scope="module")
def refusing(endpoints: dict[str, ServedEndpoint]) -> Iterator[TestClient]:
    """A server that only ever refuses, so that many tests may share it."""
    coordinator: Any = FakeCoordinator()
    with TestClient(make_api(Service(endpoints, coordinator))) as client:
        yield client
    assert not coordinator.requests


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def lonely_client(**limits: Any) -> TestClient:
    """A server whose coordinator has no replica and is not running."""
    coordinator = Coordinator(LocalExchange().join("coordinator"), **limits)
    return TestClient(
        make_api(
            Service(load_endpoints(load_config(TINY_CONFIG)), coordinator, limits=Limits(max_requests=MAX_REQUESTS))
        )
    )


def test_health_needs_a_target(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ready", "models": {"drafter": True, "target": True}}
    lonely = lonely_client().get("/health")
    assert lonely.status_code == 503
    assert lonely.json() == {"status": "loading", "models": {"drafter": False, "target": False}}


def test_models_are_listed(fake: TestClient) -> None:
    (card,) = fake.get("/v1/models").json()["data"]
    assert card == fake.get("/v1/models/consort").json()
    assert (card["id"], card["target"], card["drafter"], card["ready"]) == ("consort", "target", "drafter", True)
    assert fake.get("/v1/models/org/name").status_code == 404
    assert fake.get("/v1/models/").json() == fake.get("/v1/models").json()
    assert fake.get("/v1/models/consort/").json() == card


def test_an_answer_has_usage_statistics_and_the_seed(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=BODY).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["seed"] == 1
    assert answer["speculation"]["steps"] > 0


def test_what_load_generators_send_is_served(fake: TestClient) -> None:
    """The body that `vllm bench serve` sends."""
    body = {
        "model": "consort",
        "prompt": "import os",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "speculate": False,
    }
    *_, usage, done = events(fake.post("/v1/completions", json=body).text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)])
def test_a_stream_is_the_answer_in_pieces(client: TestClient, path: str, body: dict[str, Any]) -> None:
    whole = client.post(path, json=body).json()
    response = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    text = "".join(piece["text"] if "text" in piece else piece["delta"]["content"] for piece in pieces)
    choice = whole["choices"][0]
    assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert ["speculation" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


def test_without_include_usage_a_stream_has_none(client: TestClient) -> None:
    chunks = events(client.post("/v1/completions", json={**BODY, "stream": True}).text)[:-1]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_fields_that_are_null_have_their_defaults(fake: TestClient) -> None:
    nulls = dict.fromkeys(
        name for name in CompletionRequest.model_fields if name not in {"model", "prompt", "max_tokens", "seed"}
    )
    answer = fake.post("/v1/completions", json={**BODY, **nulls}).json()
    assert answer["choices"] == fake.post("/v1/completions", json=BODY).json()["choices"]


def test_completions_have_16_tokens_by_default(client: TestClient) -> None:
    body = {**BODY, "max_tokens": None}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16
    body["prompt"] = [5] * 1020
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4


def test_chat_fills_the_context_by_default(client: TestClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x "}] * 495}]
    usage = client.post("/v1/chat/completions", json={**CHAT_BODY, "messages": messages, "max_tokens": None}).json()[
        "usage"
    ]
    assert usage["total_tokens"] <= 1024
    assert usage["completion_tokens"] > 16


def test_a_missing_seed_is_drawn_and_reproduces(client: TestClient) -> None:
    body = {**BODY, "max_tokens": 12, "seed": None}
    first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = client.post("/v1/completions", json={**body, "seed": first["seed"]}).json()
    assert again["choices"] == first["choices"]


def test_every_prompt_has_its_choice(client: TestClient) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    together = client.post("/v1/completions", json={**BODY, "prompt": prompts}).json()
    alone = [client.post("/v1/completions", json={**BODY, "prompt": prompt}).json() for prompt in prompts]
    assert [choice["text"] for choice in together["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    assert together["usage"]["total_tokens"] == sum(answer["usage"]["total_tokens"] for answer in alone)


@pytest.mark.parametrize(("path", "body", "field"), CASES)
def test_bad_input_is_refused_by_name(refusing: TestClient, path: str, body: str, field: str) -> None:
    response = refusing.post(path, content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert field in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "field"), [({"n": 9}, "n"), ({"best_of": 3, "prompt": ["a", "b", "c"]}, "n")])
def test_more_answers_than_are_taken_on_at_once_are_refused(
    fake: TestClient, fields: dict[str, object], field: str
) -> None:
    error = fake.post("/v1/completions", json={**BODY, **fields}).json()["error"]
    assert (error["param"], error["message"]) == (
        field,
        f"n: 9 answers are too many; at most {MAX_REQUESTS} are taken at once.",
    )


@pytest.mark.parametrize("body", NO_OBJECTS)
def test_what_is_no_object_is_refused(fake: TestClient, body: str) -> None:
    content = body.encode("utf-8", "surrogatepass")
    response = fake.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_unknown_names_get_a_suggestion(fake: TestClient) -> None:
    typo = fake.post("/v1/completions", json={**BODY, "temprature": 1, "strict": True}).json()["error"]
    assert typo["message"] == "temprature: is not known; did you mean 'temperature'?"
    model = fake.post("/v1/completions", json={**BODY, "model": "concort"})
    assert model.status_code == 404
    assert model.json()["error"] == {
        "message": "model: there is no model 'concort'; did you mean 'consort'?",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_unknown_routes_and_methods_have_the_same_shape(fake: TestClient) -> None:
    for reply, status in ((fake.get("/nowhere"), 404), (fake.get("/v1/completions"), 405)):
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def limited(endpoints: dict[str, ServedEndpoint], coordinator: Any, limits: Limits) -> TestClient:
    return TestClient(make_api(Service(endpoints, coordinator, limits=limits)))


def test_overload_says_when_to_come_back(endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator) -> None:
    client = limited(endpoints, coordinator, Limits(max_tokens=15))
    reply = client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]})
    assert reply.status_code == 429
    assert reply.headers["Retry-After"] == "1"
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_that_has_passed_is_told(
    endpoints: dict[str, ServedEndpoint], coordinator: FakeCoordinator, stream: bool
) -> None:
    coordinator.slots = 0
    client = limited(endpoints, coordinator, Limits(running={"target": 0}))
    reply = client.post("/v1/completions", json={**BODY, "timeout_s": 0.02, "stream": stream})
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert coordinator.requests == []


def test_until_its_model_is_loaded_a_request_is_refused() -> None:
    reply = lonely_client().post("/v1/completions", json=BODY)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the model 'target' is loading"
    assert int(reply.headers["Retry-After"]) > 0


def test_readiness_needs_every_target_and_health_needs_one(fake: TestClient, coordinator: FakeCoordinator) -> None:
    assert fake.get("/ready").status_code == 200
    coordinator.ready = {"drafter"}
    assert (fake.get("/ready").status_code, fake.get("/health").status_code) == (503, 503)
    assert fake.get("/version").json()["version"]


@pytest.mark.parametrize(("error", "status"), [(UnavailableError("gone"), 503), (RuntimeError("secret"), 500)])
def test_failures_before_the_first_token_have_a_status(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    async def run(requests: list[object], **options: object) -> Any:
        for _ in requests:
            raise error
        yield

    monkeypatch.setattr(service, "run", run)
    client = TestClient(make_api(service), raise_server_exceptions=False)
    for stream in (False, True):
        reply = client.post("/v1/completions", json={**BODY, "stream": stream})
        assert reply.status_code == status
        assert ("gone" in reply.text, "secret" in reply.text) == (status == 503, False)


def test_a_failure_in_mid_stream_is_an_event(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    original = service.run

    async def run(requests: Any, **options: Any) -> Any:
        async for batch in original(requests, **options):
            yield batch
            raise UnavailableError("gone")

    monkeypatch.setattr(service, "run", run)
    client = TestClient(make_api(service))
    text = client.post("/v1/completions", json={**BODY, "stream": True}).text
    chunk, *_, error = events(text)  # what the first batch holds depends on the clock
    assert text.count("event: error") == 1
    assert chunk["choices"][0]["index"] == 0
    assert error == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "unavailable"}}


def test_a_body_that_is_not_announced_as_json_says_what_is_missing(fake: TestClient) -> None:
    answer = fake.post("/v1/completions", content=b'{"model": "e", "prompt": "x"}')
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_an_upper_bound_beyond_the_context_is_lowered_and_a_wish_is_refused(fake: TestClient) -> None:
    body = {"model": "consort", "messages": [{"role": "user", "content": "x"}]}
    bounded = fake.post("/v1/chat/completions", json={**body, "max_completion_tokens": 5000})
    assert bounded.json()["usage"]["total_tokens"] == 1024
    wished = fake.post("/v1/chat/completions", json={**body, "max_tokens": 5000})
    assert wished.status_code == 400
