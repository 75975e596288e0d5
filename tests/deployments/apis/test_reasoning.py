"""Reasoning over HTTP: apart from the content, streamed, sent back, and switched by the chat template."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.scripted import CALL, TEMPLATE, TOOLS, Scripted

THINKING = (
    TEMPLATE.replace("{{ message.content }}", "({{ message.reasoning_content }}){{ message.content }}")
    + "\nassistant: {% if enable_thinking is defined %}{% if enable_thinking %}<think>\n"
    + "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUESTION = {"role": "user", "content": "What is the weather?"}
BODY: dict[str, Any] = {"model": "consort", "messages": [QUESTION], "tools": TOOLS}
ANSWER = f"<think>\nLet me\nsee.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def thinker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, Scripted]]:
    """A model that thinks, then calls."""
    endpoints = load_endpoints(load_config(TINY_CONFIG))
    served = endpoints["consort"]
    served.encoder.tokenizer.chat_template = THINKING
    served.token_decoder.tool_format, served.token_decoder.has_think_tags = "hermes", True
    monkeypatch.setattr(Scripted, "text", ANSWER)
    coordinator: Any = Scripted()
    with TestClient(make_api(Service(endpoints, coordinator))) as client:
        yield client, coordinator


def prompts(client: TestClient, coordinator: Scripted) -> list[str]:
    return [
        client.post("/detokenize", json={"model": "consort", "tokens": list(request.prompt)}).json()["prompt"]
        for request in coordinator.requests
    ]


def test_chat_has_reasoning_content(thinker: tuple[TestClient, Scripted]) -> None:
    answer = thinker[0].post("/v1/chat/completions", json=BODY).json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me\nsee.", "I look.")
    assert (choice["finish_reason"], message["tool_calls"][0]["function"]["name"]) == ("tool_calls", "weather")
    reply = thinker[0].post("/v1/chat/completions", json={**BODY, "stream": True})
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me\nsee."
    assert "".join(delta["content"] for delta in deltas) == "I look."
    assert sum("reasoning_content" in delta for delta in deltas) > 1
    assert not any(delta.get("reasoning_content") and delta["content"] for delta in deltas)


def test_responses_have_a_reasoning_item_that_can_be_sent_back(thinker: tuple[TestClient, Scripted]) -> None:
    client, coordinator = thinker
    body = {"model": "consort", "input": [QUESTION]}
    answer = client.post("/v1/responses", json=body).json()
    reasoning, message = answer["output"]
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me\nsee."}]
    assert message["content"][0]["text"].startswith("I look.")
    again = client.post("/v1/responses", json={**body, "input": [QUESTION, reasoning, message, QUESTION]})
    assert again.status_code == 200, again.text
    assert "(Let me\nsee.)I look." in prompts(client, coordinator)[-1]
    kinds = [
        line[7:]
        for line in client.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
        if line.startswith("event: ")
    ]
    assert "response.reasoning_text.delta" in kinds
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


def test_messages_have_a_thinking_block_that_can_be_sent_back(thinker: tuple[TestClient, Scripted]) -> None:
    client, coordinator = thinker
    body = {"model": "consort", "max_tokens": 64, "messages": [QUESTION]}
    answer = client.post("/v1/messages", json=body).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0]["thinking"] == "Let me\nsee."
    turns = [QUESTION, {"role": "assistant", "content": answer["content"]}, QUESTION]
    assert client.post("/v1/messages", json={**body, "messages": turns}).status_code == 200
    assert "(Let me\nsee.)I look." in prompts(client, coordinator)[-1]
    stream = client.post("/v1/messages", json={**body, "stream": True}).text
    assert stream.index("thinking_delta") < stream.index("signature_delta") < stream.index("text_delta")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"reasoning_effort": "none"}),
        ("chat/completions", {"enable_thinking": False}),
        ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}),
        ("messages", {"thinking": {"type": "disabled"}, "max_tokens": 64}),
        ("responses", {"reasoning": {"effort": "none"}}),
    ],
)
def test_thinking_can_be_turned_off(thinker: tuple[TestClient, Scripted], path: str, fields: dict[str, Any]) -> None:
    client, coordinator = thinker
    conversation = {"input": [QUESTION]} if path == "responses" else {"messages": [QUESTION]}
    response = client.post(f"/v1/{path}", json={"model": "consort", **conversation, **fields})
    assert response.status_code == 200, response.text
    assert "X-Consort-Ignored-Fields" not in response.headers
    assert prompts(client, coordinator)[-1].endswith("<think>\n\n</think>\n\n")


def test_a_switch_that_the_template_lacks_is_ignored_or_refused(scripted: tuple[TestClient, Scripted]) -> None:
    body = {"model": "consort", "messages": [QUESTION], "enable_thinking": True}
    assert scripted[0].post("/v1/chat/completions", json=body).headers["X-Consort-Ignored-Fields"] == "enable_thinking"
    refused = scripted[0].post("/v1/chat/completions", json={**body, "strict": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "enable_thinking")


def test_reasoning_that_the_prompt_begins(
    thinker: tuple[TestClient, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "text", "Hm.</think>Yes.")
    body = {**BODY, "reasoning_effort": "low"}
    message = thinker[0].post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    structured = {**body, "response_format": {"type": "json_object"}}  # follows the grammar from its first token on
    message = thinker[0].post("/v1/chat/completions", json=structured).json()["choices"][0]["message"]
    assert message["content"] == "Hm.</think>Yes."
    assert "reasoning_content" not in message
