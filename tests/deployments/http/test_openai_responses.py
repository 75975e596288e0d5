"""/v1/responses by the official client, over a fake coordinator."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

ASKED: dict[str, Any] = {"model": "consort", "input": "hi", "max_output_tokens": 12, "extra_body": {"seed": 1}}

FUNCTION = {"type": "function", "name": "f"}


@pytest.fixture
def client(fake: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=fake, max_retries=0) as client:
        yield client


def test_a_response_is_what_chat_answers(client: openai.OpenAI, fake: TestClient) -> None:
    response = client.responses.create(**ASKED)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "consort", "messages": messages, "max_tokens": 12, "seed": 1}
    chat = fake.post("/v1/chat/completions", json=body).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 12
    assert (response.model_extra or {})["seed"] == 1


def test_instructions_are_a_system_message_and_outputs_can_be_sent_back(
    client: openai.OpenAI, fake: TestClient, coordinator: Any
) -> None:
    response = client.responses.create(**{**ASKED, "instructions": "Be kind."})
    again = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in response.output), ASKED["input"]]
    again[-1] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and?"}]}
    client.responses.create(**{**ASKED, "input": again, "instructions": "Be kind."})
    turns = [("system", "Be kind."), ("user", "hi"), ("assistant", response.output_text), ("user", "and?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"model": "consort", "messages": messages, "max_tokens": 1}
    fake.post("/v1/chat/completions", json=body)
    assert coordinator.requests[-1].prompt == coordinator.requests[-2].prompt


def test_a_stream_comes_about_in_openais_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_clients_own_accumulation_works(client: openai.OpenAI) -> None:
    stop = client.responses.create(**ASKED).output_text[9:11]
    asked = {**ASKED, "extra_body": {"seed": 1, "stop": stop}}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == client.responses.create(**asked).output_text


def test_log_probabilities_are_included_if_wanted(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    content: Any = response.output[0]
    assert [len(token.top_logprobs) for token in content.content[0].logprobs] == [2] * 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True, "strict": True}, "store"),
        ({"tools": [{**FUNCTION, "type": "functon", "parameters": {}}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}], "strict": True}, "tools.0.name"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": [{"type": "function_call"}]}, "input.0.call_id"),
        ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input.0.output"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"max_output_token": 2, "strict": True}, "max_output_token"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_what_needs_more_is_refused(fake: TestClient, fields: dict[str, object], param: str) -> None:
    reply = fake.post("/v1/responses", json={"model": "consort", "input": "x", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "\ud800"}, "user"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"tools": [{**FUNCTION, "parameters": {"a": ["\ud800"]}}]}, "tools.0.parameters"),
        ({"text": {"format": {"type": "text", "name": "\ud800"}}}, "text.format.name"),
        ({"text": {"format": {"type": "text", "description": "\ud800"}}}, "text.format.description"),
        ({"text": {"format": {"type": "json_schema", "schema": {"\ud800": 1}}}}, "text.format.schema"),
    ],
)
def test_what_could_not_be_sent_back_is_refused(
    fake: TestClient, coordinator: Any, fields: dict[str, object], param: str
) -> None:
    body = json.dumps({"model": "consort", "input": "x", **fields})
    reply = fake.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert "lone surrogates" in reply.json()["error"]["message"]
    assert not coordinator.requests


def test_a_schema_reaches_the_decoder(client: openai.OpenAI, coordinator: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    client.responses.create(**{**ASKED, "text": text})
    assert coordinator.requests[-1].params.structure.definition == '{"type": "object"}'
