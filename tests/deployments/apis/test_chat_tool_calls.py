"""Tool calls over HTTP: tools in the chat template, calls in answers, forced calls."""

import json
import re
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.chat.chat_completion_message_function_tool_call import Function

from actors.replica.in_process import Engine
from deployments.apis.chat.request import ChatRequest
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.scripted import CALL, TOOLS, Scripted

QUESTION = {"role": "user", "content": "What is the weather in Bern?"}
BODY: dict[str, Any] = {"model": "consort", "messages": [QUESTION], "tools": TOOLS}


def ask(client: TestClient, **fields: object) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.json()
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_a_call_is_told_apart_from_the_text(scripted: tuple[TestClient, Scripted]) -> None:
    choice = ask(scripted[0])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


def test_a_stream_brings_the_arguments_as_they_come(scripted: tuple[TestClient, Scripted]) -> None:
    reply = scripted[0].post("/v1/chat/completions", json={**BODY, "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    (start, *rest) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta["content"] for delta in deltas) == "I look."
    function = {"name": "weather", "arguments": ""}
    assert start == {"index": 0, "id": start["id"], "type": "function", "function": function}
    assert [set(call) for call in rest] == [{"index", "function"}] * len(rest)
    assert len(rest) >= len('{"city": "Bern"}') // 4
    assert all(len(delta.get("tool_calls", ())) < 2 for delta in deltas)
    assert all(delta["content"] or delta.get("tool_calls") for delta in deltas[1:-1])
    (whole,) = ask(scripted[0])["message"]["tool_calls"]
    assert "".join(call["function"]["arguments"] for call in rest) == whole["function"]["arguments"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]


def test_the_official_client_puts_streamed_calls_together(
    scripted: tuple[TestClient, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = '<tool_call>{"name": "time"}</tool_call>'
    monkeypatch.setattr(Scripted, "text", f"I look.\n{CALL}\n{other}")
    http: Any = scripted[0]
    asked: Any = {**BODY, "extra_body": {"return_token_details": True}}
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0) as client:
        with client.chat.completions.stream(**asked) as stream:
            seen = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            streamed = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**asked).choices[0]
    assert streamed.message.content == whole.message.content == "I look."
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    calls = [call.function for call in streamed.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "Bern"}'), ("time", "{}")]
    assert [call.function for call in whole.message.tool_calls or () if call.type == "function"] == [
        Function(name=call.name, arguments=call.arguments) for call in calls
    ]
    assert "".join(event.arguments_delta for event in seen if event.index == 0) == '{"city": "Bern"}'
    details = (streamed.model_extra or {})["token_details"]
    assert "".join(detail["text"] for detail in details)


def test_without_tools_or_with_none_the_text_stays_as_it_is(scripted: tuple[TestClient, Scripted]) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        choice = ask(scripted[0], **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": Scripted.text}


@pytest.mark.parametrize(
    ("content", "streamed"),
    [(None, {}), ("", {"index": 0})],  # as OpenAI's client sends a call back, and as Open WebUI does
)
def test_the_template_gets_tools_calls_and_results(
    scripted: tuple[TestClient, Scripted],
    with_tools: dict[str, ServedEndpoint],
    content: str | None,
    streamed: dict[str, int],
) -> None:
    client, coordinator = scripted
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    called = {**streamed, "id": "a", "type": "function", "function": function}
    turns = [
        QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    ask(client, messages=turns)
    prompt = with_tools["consort"].token_decoder.decode(list(coordinator.requests[-1].prompt))
    assert '"Of a city."' in prompt
    assert '<tool_call>weather {"city": "Bern"}</tool_call>' in prompt
    assert prompt.endswith("tool: sunny")


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_forced_call_follows_the_schema(
    engine: Engine, with_tools: dict[str, ServedEndpoint], choice: object, names: set[str]
) -> None:
    with TestClient(make_api(Service(with_tools, engine.coordinator))) as client:
        for seed in range(3):
            limits = {"max_tokens": 300, "seed": seed, "parallel_tool_calls": False}
            answer = ask(client, tool_choice=choice, **limits)
            if answer["finish_reason"] == "length":  # the models are random
                continue
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "time" or arguments["city"] in ("Bern", "Ulm")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ],
)
def test_what_does_not_fit_is_refused(
    scripted: tuple[TestClient, Scripted], fields: dict[str, Any], param: str
) -> None:
    reply = scripted[0].post("/v1/chat/completions", json={**BODY, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_template_without_tools_gets_a_place_for_them(engine: Engine, endpoints: dict[str, ServedEndpoint]) -> None:
    with TestClient(make_api(Service(endpoints, engine.coordinator))) as client:
        (card,) = client.get("/v1/models").json()["data"]
        answers = [ask(client, tool_choice="required", max_tokens=300, seed=seed) for seed in range(3)]
    assert card["tools"] == "built-in"
    calls = [call for each in answers if each["finish_reason"] != "length" for call in each["message"]["tool_calls"]]
    assert all(call["function"]["name"] in ("weather", "time") for call in calls)


@pytest.mark.parametrize(
    ("rest", "closed"), [({}, True), ({"additionalProperties": True}, False), ({"allOf": [{"properties": {}}]}, False)]
)
def test_arguments_have_no_other_properties_unless_the_schema_speaks_of_them(
    rest: dict[str, Any], closed: bool
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, **rest}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        request = ChatRequest.model_validate({**BODY, "tools": tools, "tool_choice": choice})
        structure = request.forced_structure()
        assert structure is not None
        schema = json.loads(structure.definition)
        if choice == "required":
            schema = schema["items"]["anyOf"][0]["properties"]["arguments"]
        assert (schema.get("additionalProperties") is False) == closed


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_functions_without_arguments_are_called_without_and_no_oftener_than_there_are(
    engine: Engine, with_tools: dict[str, ServedEndpoint], parameters: dict[str, Any] | None
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("now", "here")]
    with TestClient(make_api(Service(with_tools, engine.coordinator))) as client:
        for seed in range(4):
            answer = ask(client, tools=tools, tool_choice="required", max_tokens=300, seed=seed)
            assert answer["finish_reason"] == "tool_calls"
            called = [call["function"] for call in answer["message"]["tool_calls"]]
            assert 1 <= len(called) <= 2
            assert all((call["name"], call["arguments"]) in (("now", "{}"), ("here", "{}")) for call in called)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_a_forced_call_that_was_cut_off_is_no_text(
    engine: Engine, with_tools: dict[str, ServedEndpoint], stream: bool, limit: int
) -> None:
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    flat = [{"type": "function", **function} for function in functions]
    schemas = [{"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})} for each in functions]
    bodies: dict[str, Any] = {
        "chat/completions": {**BODY, "tool_choice": "required", "max_tokens": limit},
        "responses": {"input": "x", "tools": flat, "tool_choice": "required", "max_output_tokens": limit},
        "messages": {"messages": [QUESTION], "tools": schemas, "tool_choice": {"type": "any"}, "max_tokens": limit},
    }
    ends = {"chat/completions": '"finish_reason":"length"', "responses": "incomplete", "messages": '"max_tokens"'}
    with TestClient(make_api(Service(with_tools, engine.coordinator))) as client:
        for path, body in bodies.items():
            reply = client.post(f"/v1/{path}", json={"model": "consort", "stream": stream, **body})
            assert reply.status_code == 200, reply.text
            assert ends[path] in reply.text
            assert re.search(r'"(content|text|delta)": ?"[^"]', reply.text) is None
