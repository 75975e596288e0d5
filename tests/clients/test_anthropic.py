"""Anthropic's own client: messages, streams, a loop with tools, thinking, counts, errors."""

from collections.abc import Iterator
from typing import Any

import pytest

anthropic: Any = pytest.importorskip("anthropic")

ASK = [{"role": "user", "content": "What is the answer?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
OPTIONS = {"model": "consort", "max_tokens": 1000}


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = client.messages.create(**OPTIONS, messages=ASK, system="Be brief.")
    assert [block.text for block in message.content] == ["The answer is 42."]
    assert (message.stop_reason, message.usage.input_tokens > 0) == ("end_turn", True)


def test_a_loop_with_tools(client: Any) -> None:
    first = client.messages.create(**OPTIONS, messages=ASK, tools=TOOLS)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("I look.", "weather", {"city": "Bern"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*ASK, first.to_param() if hasattr(first, "to_param") else first, {"role": "user", "content": [result]}]
    assert client.messages.create(**OPTIONS, messages=turns, tools=TOOLS).content[0].text == "The answer is 42."


def test_a_forced_call(client: Any) -> None:
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = client.messages.create(**OPTIONS, messages=ASK, tools=TOOLS, tool_choice=choice)
    assert [(block.type, block.input) for block in message.content] == [("tool_use", {"city": "Bern"})]


def test_a_stream(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**OPTIONS, messages=ASK, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "text"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == ("Let me see.", "The answer is 42.")
    with client.messages.stream(**OPTIONS, messages=ASK) as stream:
        assert "".join(stream.text_stream) == "The answer is 42."


def test_a_stream_with_tools(client: Any) -> None:
    with client.messages.stream(**OPTIONS, messages=ASK, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert final.content[1].input == {"city": "Bern"}
    assert final.stop_reason == "tool_use"


def test_tokens_are_counted(client: Any) -> None:
    count = client.messages.count_tokens(model="consort", messages=ASK, system="Be brief.", tools=TOOLS)
    message = client.messages.create(**OPTIONS, messages=ASK, system="Be brief.", tools=TOOLS)
    assert count.input_tokens == message.usage.input_tokens


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**OPTIONS, "model": "claude"}, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(**OPTIONS, messages=ASK, tool_choice={"type": "any"})
