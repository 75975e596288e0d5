"""OpenAI's own client: chat, parse, a loop with tools, responses, the helpers for streams."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

openai: Any = pytest.importorskip("openai")

ASK = [{"role": "user", "content": "What is the answer?"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}}]


class City(BaseModel):
    """What an answer is parsed into."""

    name: str
    people: int


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="consort", messages=ASK)
    assert answer.choices[0].message.content == "The answer is 42."
    assert answer.usage.completion_tokens > 0


def test_a_conversation_of_the_clients_own_messages(client: Any) -> None:
    first = client.chat.completions.create(model="consort", messages=ASK).choices[0].message
    for earlier in (first, first.model_dump(), first.to_dict()):
        again = client.chat.completions.create(model="consort", messages=[*ASK, earlier, *ASK])
        assert again.choices[0].finish_reason == "stop"


def test_parse(client: Any) -> None:
    message = client.chat.completions.parse(model="consort", messages=ASK, response_format=City).choices[0].message
    assert message.parsed == City(name="Bern", people=42)
    client.chat.completions.create(model="consort", messages=[*ASK, message.model_dump(warnings=False), *ASK])


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_loop_with_tools(client: Any, as_dictionary: bool) -> None:
    first = client.chat.completions.create(model="consort", messages=ASK, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    turn = first.message.model_dump() if as_dictionary else first.message
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = client.chat.completions.create(model="consort", messages=[*ASK, turn, result], tools=TOOLS).choices[0]
    assert last.message.content == "The answer is 42."


def test_pydantic_tools(client: Any) -> None:
    tool = openai.pydantic_function_tool(City)
    answer = client.chat.completions.parse(model="consort", messages=ASK, tools=[tool], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == City(name="Bern", people=42)


def test_streams(client: Any) -> None:
    with client.chat.completions.stream(model="consort", messages=ASK, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert final.message.content == "I look."
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Bern"}


def test_reasoning(client: Any) -> None:
    answer = client.chat.completions.create(model="consort", messages=ASK, reasoning_effort="high")
    assert answer.choices[0].message.reasoning_content == "Let me see."
    assert answer.choices[0].message.content == "The answer is 42."


def test_responses(client: Any) -> None:
    response = client.responses.create(model="consort", input="Hello", reasoning={"effort": "low", "summary": "auto"})
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == "The answer is 42."
    again = client.responses.create(model="consort", input=[*ASK, *response.output, *ASK], store=True)
    assert again.status == "completed"
    assert client.responses.parse(model="consort", input="x", text_format=City).output_parsed.people == 42


def test_a_conversation_goes_on_by_its_id(client: Any) -> None:
    first = client.responses.create(model="consort", input="Hello")
    second = client.responses.create(model="consort", input=ASK, previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(first.id)
    for gone in (first.id, f"resp_{'0' * 24}"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_responses_stream(client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    options = {"model": "consort", "input": ASK, "tools": [tool], "reasoning": {"effort": "high"}}
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    call = final.output[-1]
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Bern"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    with client.responses.stream(**{**options, "input": [*ASK, *final.output, result]}) as stream:
        assert [item.type for item in stream.until_done().get_final_response().output] == ["reasoning", "message"]


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="consort", input="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="consort", messages=ASK, max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"
