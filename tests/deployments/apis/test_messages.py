"""Anthropic's Messages API over HTTP: conversations, events, tools, thinking, counts, errors."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from fastapi.testclient import TestClient

from actors.replica.in_process import Engine
from deployments.configuration.api_keys import ApiKey, KeyRing, digest_of
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.scripted import CALL, TOOLS, Scripted

QUESTION = {"role": "user", "content": "What is the weather in Bern?"}
BODY: dict[str, Any] = {"model": "consort", "max_tokens": 64, "messages": [QUESTION]}
FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
OWN_TOOLS = [
    {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters", {"type": "object"}),
    }
    for function in FUNCTIONS
]


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream, whose names are their types."""
    parsed = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        parsed.append(event)
    return parsed


def send(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/messages", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture
def http(scripted: tuple[TestClient, Scripted]) -> TestClient:
    return scripted[0]


def test_a_message_has_text_usage_and_a_reason(client: TestClient) -> None:
    answer = send(client, max_tokens=8, seed=1, system="Be brief.")
    (block,) = answer["content"]
    assert (answer["type"], answer["role"], block["type"]) == ("message", "assistant", "text")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"]["output_tokens"] == 8
    chat = {
        "model": "consort",
        "max_tokens": 8,
        "seed": 1,
        "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
    }
    same = client.post("/v1/chat/completions", json=chat).json()
    assert block == {"type": "text", "text": same["choices"][0]["message"]["content"]}  # clients refuse null citations
    assert answer["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert answer["seed"] == 1


def test_a_stop_sequence_is_named(client: TestClient) -> None:
    text = send(client, max_tokens=40, seed=1)["content"][0]["text"]
    stopped = send(client, max_tokens=40, seed=1, stop_sequences=[text[10:14]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[10:14])
    assert stopped["content"][0]["text"] == text[: text.index(text[10:14])]
    assert send(client, max_tokens=40, seed=1, stop=text[10:14])["content"] == stopped["content"]


def test_a_limit_above_the_context_is_lowered(client: TestClient) -> None:
    answer = send(client, max_tokens=32_000, stop_sequences=["e"], seed=1)
    assert answer["stop_reason"] in ("stop_sequence", "max_tokens")


def test_a_call_is_a_block(http: TestClient) -> None:
    answer = send(http, tools=OWN_TOOLS)
    text, call = answer["content"]
    assert (text["text"], answer["stop_reason"]) == ("I look.", "tool_use")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern"})


def test_a_stream_is_the_message_in_pieces(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "text", f'I look.\n{CALL}\n<tool_call>{{"name": "time"}}</tool_call> Wait.')
    response = http.post("/v1/messages", json={**BODY, "tools": OWN_TOOLS, "stream": True})
    stream = events(response.text)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(event["type"] for event in stream)] == [
        "message_start",
        *block * 4,
        "message_delta",
        "message_stop",
    ]
    contents: list[dict[str, Any]] = []
    for event in stream:
        match event:
            case {"type": "content_block_start"}:
                contents.append({**event["content_block"], "json": ""})
            case {"delta": {"type": "text_delta", "text": piece}}:
                contents[event["index"]]["text"] += piece
            case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                contents[event["index"]]["json"] += piece
    whole = send(http, tools=OWN_TOOLS)
    read = [{**content, "input": json.loads(content["json"])} if content["json"] else content for content in contents]
    for content, other in zip(read, whole["content"], strict=True):
        assert {**content, "id": 0, "json": 0} == {**other, "id": 0, "json": 0}
    assert stream[0]["message"]["content"] == []
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert stream[-2]["usage"] == whole["usage"]


def test_calls_and_results_go_back(http: TestClient, scripted: tuple[TestClient, Scripted]) -> None:
    answer = send(http, tools=OWN_TOOLS)
    call = answer["content"][1]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [QUESTION, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    send(http, tools=OWN_TOOLS, messages=turns)
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": call["id"], "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    tools = [
        {"type": "function", "function": {**tool, "parameters": own["input_schema"], "description": own["description"]}}
        for tool, own in zip(FUNCTIONS, OWN_TOOLS, strict=True)
    ]
    chat = http.post("/v1/chat/completions", json={"model": "consort", "messages": messages, "tools": tools})
    assert chat.status_code == 200, chat.text
    *_, by_anthropic, by_openai = [request.prompt for request in scripted[1].requests]
    assert by_anthropic == by_openai


@pytest.fixture
def random_model(engine: Engine, with_tools: dict[str, ServedEndpoint]) -> Iterator[TestClient]:
    with TestClient(make_api(Service(with_tools, engine.coordinator))) as client:
        yield client


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_forced_call_follows_the_schema(random_model: TestClient, choice: Any) -> None:
    tools = [{"name": "weather", "input_schema": FUNCTIONS[0]["parameters"]}]
    for seed in range(3):
        answer = send(random_model, tools=tools, tool_choice=choice, max_tokens=300, seed=seed)
        if answer["stop_reason"] == "max_tokens":  # the models are random
            continue
        (call,) = answer["content"]
        assert (answer["stop_reason"], call["input"]["city"] in ("Bern", "Ulm")) == ("tool_use", True)


def test_a_format_is_followed(random_model: TestClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = send(
            random_model, output_config={"format": {"type": "json_schema", "schema": schema}}, seed=seed, max_tokens=300
        )
        if answer["stop_reason"] == "end_turn":
            assert json.loads(answer["content"][0]["text"]) == {"city": "Bern"}


def test_the_answer_goes_on_with_the_assistants_last_message(
    http: TestClient, scripted: tuple[TestClient, Scripted]
) -> None:
    send(http, messages=[QUESTION, {"role": "assistant", "content": "It is"}])
    prompt = scripted[1].requests[-1].prompt
    tokens = http.post("/detokenize", json={"model": "consort", "tokens": list(prompt)}).json()
    assert tokens["prompt"].endswith("It is")


def test_tokens_are_counted(http: TestClient) -> None:
    count = http.post("/v1/messages/count_tokens", json={"model": "consort", "messages": [QUESTION]})
    assert count.json() == {"input_tokens": send(http)["usage"]["input_tokens"]}
    with_tools = http.post("/consort/v1/messages/count_tokens", json={"messages": [QUESTION], "tools": OWN_TOOLS})
    assert with_tools.json()["input_tokens"] > count.json()["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "param"),
    [
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.id",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type",
        ),
        (
            {"tools": [{"type": "tool", "name": "f", "input_schema": {}}]},
            400,
            "invalid_request_error",
            "tools.0.type",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"title": "\ud800"}}]},
            400,
            "invalid_request_error",
            "tools.0.input_schema",
        ),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"strict": True, "surprise": 1}, 400, "invalid_request_error", "surprise"),
    ],
)
def test_errors_have_anthropics_form(http: TestClient, fields: Any, status: int, kind: str, param: str) -> None:
    body = json.dumps({**BODY, **fields})
    response = http.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()
    assert error["type"] == "error"
    assert (error["error"]["type"], error["error"]["param"]) == (kind, param)
    assert error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_anthropics_api_error_and_tells_nothing_else(
    with_tools: dict[str, ServedEndpoint], coordinator: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Before the first event it is a 500 with the form of other errors."""

    def fail(*_: Any) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(coordinator, "submit", fail)
    client = TestClient(make_api(Service(with_tools, coordinator)), raise_server_exceptions=False)
    response = client.post("/v1/messages", json={**BODY, "stream": stream})
    assert response.status_code == 500
    error = response.json()
    assert (error["type"], error["error"]["type"], error["error"]["code"]) == ("error", "api_error", "internal_error")
    assert "secret" not in response.text
    assert int(response.headers["Content-Length"]) == len(response.content)


def test_a_key_may_come_as_anthropics_clients_send_it(with_tools: dict[str, ServedEndpoint], coordinator: Any) -> None:
    keys = KeyRing([ApiKey("alice", digest_of("secret"))])
    with TestClient(make_api(Service(with_tools, coordinator), keys=keys)) as client:
        refused = client.post("/v1/messages", json=BODY, headers={"X-Api-Key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert client.post("/v1/messages", json=BODY, headers={"X-Api-Key": "secret"}).status_code == 200


def test_what_agents_send_is_taken(http: TestClient) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    fields = {
        "system": [{"type": "text", "text": "Be brief.", **mark}],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "service_tier": "auto",
        "tools": [{**tool, **mark} for tool in OWN_TOOLS],
    }
    response = http.post("/v1/messages?beta=true", json={**BODY, **fields}, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert response.headers["X-Consort-Ignored-Fields"] == "context_management, budget_tokens, thinking"


def test_details_of_tokens_have_no_effect(http: TestClient) -> None:
    body = {**BODY, "return_token_details": True}
    assert http.post("/v1/messages", json=body).headers["X-Consort-Ignored-Fields"] == "return_token_details"
    refused = http.post("/v1/messages", json={**body, "strict": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_details")


def test_a_user_id_may_be_null(http: TestClient) -> None:
    send(http, metadata={"user_id": None})
    response = http.post("/v1/messages", json={**BODY, "metadata": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("embeddings", "no embeddings; ask"),
        ("rerank", "no rerankers; ask"),
        ("audio/transcriptions", "no sound; ask"),
        ("images/generations", "no images; ask"),
    ],
)
def test_what_other_models_do_is_refused_with_what_to_use(http: TestClient, path: str, missing: str) -> None:
    response = http.post(f"/v1/{path}", json={"model": "consort", "input": "x"})
    assert response.status_code == 404
    assert missing in response.json()["error"]["message"]
