"""What clients of other servers send by habit is accepted, and the response says what was ignored."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.apis.responses.request import ResponsesRequest
from deployments.fields.conversation import Message

MODEL = {"model": "consort", "max_tokens": 4}
USER = {"role": "user", "content": "hi"}
IGNORED = "x-consort-ignored-fields"


def chat(fake: TestClient, **fields: Any) -> Any:
    return fake.post("/v1/chat/completions", json={**MODEL, "messages": [USER], **fields})


@pytest.mark.parametrize(
    ("message", "ignored"),
    [
        ({"content": "yes", "refusal": None, "annotations": [], "parsed": None}, "refusal, annotations, parsed"),
        ({"content": "yes", "provider_specific_fields": {"a": 1}}, "provider_specific_fields"),
        ({"content": "yes", "reasoning_content": "hm", "audio": None}, "audio"),
        ({"content": None, "refusal": "no"}, "refusal"),
        ({"content": "", "tool_calls": [], "function_call": None}, "function_call"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}, None),
    ],
)
def test_an_earlier_answer_can_be_sent_back_as_a_client_keeps_it(
    fake: TestClient, message: dict[str, Any], ignored: str | None
) -> None:
    response = chat(fake, messages=[USER, {"role": "assistant", **message}, USER])
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED) == ignored


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low", "store": True}, "verbosity, store"),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, "include_obfuscation"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, "tools.custom"),
        ({"user": {"id": 7}, "metadata": {"tags": ["a"]}}, None),
        ({"top_k": -1, "seed": -1}, None),
        ({"store": False, "reasoning_effort": "none", "prediction": {"type": "content", "content": "x"}}, None),
    ],
)
def test_fields_without_effect_are_ignored(fake: TestClient, fields: dict[str, Any], ignored: str | None) -> None:
    response = chat(fake, **fields)
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED) == ignored
    if ignored:
        assert chat(fake, **fields, strict=True).status_code == 400


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "hi", "model": None}),
        ("/v1/responses", {"input": "hi", "model": ""}),
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_the_only_model_need_not_be_named(fake: TestClient, route: str, body: dict[str, Any]) -> None:
    response = fake.post(route, json=body)
    assert response.status_code == 200, response.text
    assert response.json().get("model", "consort") == "consort"


def test_tools_that_a_providers_server_runs_are_left_out(fake: TestClient) -> None:
    asked = {**MODEL, "messages": [USER]}
    tools = [
        {"name": "weather", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    response = fake.post("/v1/messages", json={**asked, "tools": tools})
    assert response.headers[IGNORED] == "tools.web_search_20250305, tools.bash_20250124"
    shown = [fake.post("/v1/messages/count_tokens", json={**asked, "tools": few}).json() for few in (tools, tools[:1])]
    assert shown[0] == shown[1]
    forced = fake.post("/v1/messages", json={**asked, "tools": tools[1:], "tool_choice": {"type": "any"}})
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice")


def test_a_tool_may_return_nothing(fake: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "1", "content": None}
    assert chat(fake, messages=[USER, {"role": "assistant", "tool_calls": [call]}, result]).status_code == 200


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "tool", "content": "18"}, "is required: the id of the call that this answers"),
        ({"role": "user", "content": "18", "tool_call_id": "1"}, "has no place in the role 'user'"),
    ],
)
def test_only_a_tools_message_names_a_call(fake: TestClient, message: dict[str, str], reason: str) -> None:
    error = chat(fake, messages=[USER, message]).json()["error"]
    assert error["message"] == f"messages.1.tool_call_id: {reason}"


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/api/v1/completions", "/v1/completions"),
    ],
)
def test_a_wrong_base_url_is_told_from_the_right_one(fake: TestClient, path: str, route: str) -> None:
    response = fake.post(path, json=MODEL)
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"POST {path}: Not Found; did you mean {route}?"


def test_a_drawn_seed_is_reported(fake: TestClient) -> None:
    assert chat(fake, seed=-1).json()["seed"] >= 0


def test_responses_take_what_their_clients_send(fake: TestClient) -> None:
    fields = {"store": True, "reasoning": {"effort": "low"}, "truncation": "auto", "include": ["reasoning.summary"]}
    response = fake.post("/v1/responses", json={"model": "consort", "input": "hi", "max_output_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    assert {*response.headers[IGNORED].split(", ")} == {"store", "truncation", "reasoning"}


def test_a_refusal_is_what_the_assistant_said() -> None:
    refusal = {"type": "refusal", "refusal": "I can't."}
    message = Message.model_validate({"role": "assistant", "content": [refusal]})
    item = {"type": "message", "role": "assistant", "content": [refusal]}
    (turn,) = ResponsesRequest.model_validate({"model": "m", "input": [item]}).to_conversation().messages
    assert message.text == turn.text == "I can't."


def test_very_many_unknown_fields_are_a_mistake(fake: TestClient) -> None:
    response = chat(fake, **{f"key{index}": index for index in range(100)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "key0")


def test_ignored_names_fit_into_a_header(fake: TestClient) -> None:
    response = chat(fake, **{f"{'k' * 500}{index}": 1 for index in range(60)}, **{"é\n": 1})
    assert response.status_code == 200
    assert len(response.headers[IGNORED]) < 4096


@pytest.mark.parametrize("fields", [{"messages": [{"role": "user", "content": "x " * 1500}]}, {"max_tokens": 2000}])
def test_a_text_that_is_too_long_has_the_code_that_clients_look_for(fake: TestClient, fields: dict[str, Any]) -> None:
    response = chat(fake, **fields)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
