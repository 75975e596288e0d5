"""Function calls in /v1/responses and /tokenize, by the official client, over scripted answers."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from actors.replica.in_process import Engine
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.scripted import CALL, TOOLS, Scripted

FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
ASKED: dict[str, Any] = {"model": "consort", "input": "What is the weather in Bern?", "tools": FLAT_TOOLS}
ARGUMENTS = '{"city": "Bern"}'


@pytest.fixture
def client(scripted: tuple[TestClient, Scripted]) -> Iterator[openai.OpenAI]:
    http: Any = scripted[0]
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0) as client:
        yield client


def test_calls_are_items_of_the_output(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, tool_choice="auto", parallel_tool_calls=True)
    message, call = response.output
    assert (message.type, response.output_text) == ("message", "I look.")
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    assert [tool.type == "function" and tool.name for tool in response.tools] == ["weather", "time"]
    assert (response.tool_choice, response.parallel_tool_calls, response.status) == ("auto", True, "completed")


def test_a_stream_brings_the_arguments_as_they_come(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'I look.\n{CALL}\n<tool_call>{{"name": "time"}}</tool_call> Wait.'
    monkeypatch.setattr(Scripted, "text", text)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    seen = [kind for kind, _ in groupby(kinds)]
    message = ["output_item.added", "content_part.added", "output_text.delta"]
    message += ["output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert seen == ["created", "in_progress", *message, *call, *call, *message, "completed"]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > len(ARGUMENTS) // 4
    assert "".join(event.delta for event in deltas if event.output_index == 1) == ARGUMENTS
    whole = client.responses.create(**ASKED)
    last: Any = events[-1]
    for item, other in zip(last.response.output, whole.output, strict=True):
        assert item.to_dict() | {"id": "", "call_id": ""} == other.to_dict() | {"id": "", "call_id": ""}


def test_the_clients_own_accumulation_works(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASKED) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == ARGUMENTS
    assert final.output_text == "I look."
    assert [item.arguments for item in final.output if item.type == "function_call"] == [ARGUMENTS]


def test_calls_and_results_go_back_as_they_came(client: openai.OpenAI, scripted: tuple[TestClient, Scripted]) -> None:
    first = client.responses.create(**ASKED)
    call = first.output[1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    for outputs in (first.output, [item.model_dump() for item in first.output]):
        turns: Any = [{"role": "user", "content": ASKED["input"]}, *outputs, result]
        client.responses.create(**{**ASKED, "input": turns})
    function = {"name": "weather", "arguments": ARGUMENTS}
    called = {"id": call.call_id, "type": "function", "function": function}
    messages = [
        {"role": "user", "content": ASKED["input"]},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    body = {"model": "consort", "messages": messages, "tools": TOOLS}
    http, coordinator = scripted
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    *_, from_objects, from_dumps, chat = [request.prompt for request in coordinator.requests]
    assert from_objects == from_dumps == chat
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == chat
    without = http.post("/tokenize", json={**body, "tools": None}).json()["tokens"]
    assert len(without) < len(tokens)


def test_none_leaves_the_text_as_it_is(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, tool_choice="none")
    assert response.output_text == Scripted.text
    assert len(response.output) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call_follows_the_schema(engine: Engine, with_tools: dict[str, ServedEndpoint], choice: Any) -> None:
    with TestClient(make_api(Service(with_tools, engine.coordinator))) as http:
        body = {**ASKED, "tool_choice": choice, "max_output_tokens": 300, "parallel_tool_calls": False}
        for seed in range(3):
            response = http.post("/v1/responses", json={**body, "seed": seed}).json()
            assert response["tool_choice"] == choice
            call = response["output"][-1]
            if response["status"] == "incomplete":  # the models are random
                continue
            assert (len(response["output"]), call["type"]) == (1, "function_call")
            assert call["name"] == "time" or json.loads(call["arguments"])["city"] in ("Bern", "Ulm")


def test_a_schema_that_is_none_is_named(client: openai.OpenAI) -> None:
    broken = {"type": "function", "name": "f", "parameters": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**ASKED, "tools": [broken], "tool_choice": "required"})
    assert refused.value.param == "tools"
