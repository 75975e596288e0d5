"""A tokenizer that declares how its model writes: special tokens delimit the parts, in chats and nowhere else."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from actors.coordinator.active_request import TextStream
from actors.coordinator.request import Delta, Request, Statistics
from actors.wire.messages import Token
from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig, parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator

TARGET = ROOT / "models" / "target"
TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<|user|>", "close": "<|system|>"},
        "tool_calls": {"open": "CALL", "close": "END", "content": "json", "repeats": True},
        "content": {},
    },
}
ANSWER = '<|user|>Let me see.<|system|>I look.CALL{"name": "weather", "arguments": {"city": "Bern"}}END'
BODY: dict[str, Any] = {
    "model": "e",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}


class Writer(FakeCoordinator):
    """Answers with the tokens of a text, one per step, and forgets no special token."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        text = TextStream(request.endpoint.decode, request.prompt, request.params)
        for number, token in enumerate(self._tokens, 1):
            finish = "stop" if number == len(self._tokens) else None
            piece = text.add([token], finish)  # type: ignore[arg-type]
            statistics = Statistics(steps=number, committed=number)
            sink(Delta(piece.text, [Token(token)], statistics, finish=piece.finish))


def config(folder: Path, template: object) -> ServerConfig:
    model = folder / "model"
    shutil.copytree(TARGET, model, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "response_template": template}))
    return parse_config(
        {"models": {"target": {"path": str(model)}}, "endpoints": {"e": {"target": "target"}}}, folder=folder
    )


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    endpoints = load_endpoints(config(tmp_path, TEMPLATE))
    tokens = endpoints["e"].encoder.tokenizer(ANSWER, add_special_tokens=False).input_ids
    coordinator: Any = Writer(tokens)
    with TestClient(make_api(Service(endpoints, coordinator))) as client:
        yield client


def test_the_parts_are_told_apart_whole_and_streamed(client: TestClient) -> None:
    choice = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "I look.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Bern"})
    assert choice["finish_reason"] == "tool_calls"
    stream = client.post("/v1/chat/completions", json={**BODY, "stream": True}).text
    lines = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [line["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta["content"] for delta in deltas) == "I look."


def test_completions_show_no_special_tokens(client: TestClient) -> None:
    text = client.post("/v1/completions", json={"model": "e", "prompt": "hi"}).json()["choices"][0]["text"]
    assert text.startswith("Let me see.I look.CALL{")


def test_without_tools_a_call_is_content(client: TestClient) -> None:
    message = client.post("/v1/chat/completions", json={**BODY, "tools": None}).json()["choices"][0]["message"]
    assert message["content"].startswith('I look.{"name"')


def test_a_template_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"response_template in tokenizer_config\.json: .*nonsense"):
        load_endpoints(config(tmp_path, {"start_anchor": "x", "fields": {"content": {"nonsense": 1}}}))
