"""No request blocks the event loop, which all streams share, or takes much memory."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deployments.watched_client import watched

LONGEST_STALL_S = 0.2
MARGIN_S = 0.15  # for processor time that other processes' caches and the collector cost on a busy machine
MOST_GROWTH_BYTES = 500 * 2**20

COMPLETION = {"model": "consort", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "consort", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with watched() as client:
        client.post("/v1/completions", json={**COMPLETION, "max_tokens": 50, "logprobs": 5}).raise_for_status()
        client.post("/tokenize", json={"model": "consort", "prompt": "x " * 1000, "return_token_strs": True})
        yield client


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({**COMPLETION, **fields}).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({**CHAT, **fields}).encode()


def responses(**fields: Any) -> tuple[str, bytes]:
    return "/v1/responses", json.dumps({"model": "consort", "max_output_tokens": 1, **fields}).encode()


def raw(path: str, text: str) -> tuple[str, bytes]:
    return path, text.encode()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


IDS = [6 + i % 2000 for i in range(40_000)]
PARTS = [{"type": "text", "text": ""}] * 60_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 400_000 + "[]]"}}
BIG_TOOL = {"type": "function", "name": "f", "parameters": {"enum": ["x" * 100] * 40_000}}

REFUSED: dict[str, tuple[tuple[str, bytes], int, str | None]] = {
    "15 MB of messages": (chat(messages=[user("a, b " * 3_000_000)]), 413, None),
    "5 MB in a message": (chat(messages=[user("a, b " * 1_000_000)]), 400, "messages"),
    "escapes": (raw("/v1/chat/completions", '{"messages":[{"content":"' + '\\",' * 1_900_000 + '"}]}'), 400, None),
    "many messages": (chat(messages=[user("")] * 100_000), 400, None),
    "many wrong messages": (chat(messages=[{}] * 80_000), 400, "messages.0.role"),
    "many wrong parts": (chat(messages=[user([{"type": "text"}] * 90_000)]), 400, "messages.0.content.0.text"),
    "many roles": (chat(messages=[{"role": "x" * 20}] * 60_000), 400, "messages.0.role"),
    "arguments of many values": (
        chat(messages=[{"role": "assistant", "tool_calls": [CALL, CALL, CALL]}]),
        400,
        "messages",
    ),
    "many empty lists": (raw("/v1/completions", '{"x":[' + "[]," * 2_000_000 + "[]]}"), 400, None),
    "many objects": (raw("/v1/completions", '{"prompt":[' + "{}," * 90_000 + "{}]}"), 400, "prompt"),
    "deep brackets": (raw("/v1/completions", "[" * 6_000_000), 400, None),
    "long numbers": (raw("/v1/completions", '{"x":[' + ("9" * 4000 + ",") * 1500 + "1]}"), 400, None),
    "a long unknown key": (chat(**{"k" * 6_000_000: 1}, strict=True), 400, None),
    "many unknown keys": (chat(**{f"key{i}": i for i in range(180_000)}), 400, "key0"),
    "a long name": (chat(model="m" * 6_000_000), 404, "model"),
    "logit_bias": (completion(logit_bias={str(i): 1 for i in range(190_000)}), 400, "logit_bias"),
    "wrong logit_bias": (completion(logit_bias={str(i): "x" for i in range(190_000)}), 400, "logit_bias"),
    "metadata": (completion(metadata={str(i): i for i in range(190_000)}), 400, "metadata"),
    "many prompt ids": (completion(prompt=[7] * 1_000_000), 400, None),
    "prompt ids": (completion(prompt=[7] * 190_000), 400, "prompt"),
    "many prompts": (completion(prompt=[[7]] * 90_000), 400, "prompt"),
    "a long prompt": (completion(prompt="x" * 6_000_000), 400, "prompt"),
    "wrong token ids": (completion(allowed_token_ids=["x"] * 190_000), 400, "allowed_token_ids.0"),
    "stop strings": (completion(stop=[5] * 190_000), 400, "stop"),
    "force_words": (completion(num_beams=2, force_words=[["a"] * 1000] * 64), 400, "force_words.0"),
    "nested variables": (chat(chat_template_kwargs=nested(900)), 400, "chat_template_kwargs"),
    "nested tools": (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]),
        400,
        "tools",
    ),
    "a large schema": (
        completion(structured_outputs={"json": {"enum": ["x" * 100] * 50_000}}),
        400,
        "structured_outputs.json",
    ),
    "log-probabilities of 32 answers": (
        completion(prompt=IDS[:900], n=32, prompt_logprobs=20, echo=True, logprobs=20),
        400,
        "prompt_logprobs",
    ),
    "many log-probabilities": (completion(logprobs=100), 400, "logprobs"),
    "many of prompts": (completion(prompt_logprobs=100), 400, "prompt_logprobs"),
    "many tokens told": (completion(n=128, logprobs=20, max_tokens=1000), 400, "logprobs"),
    "detokenized, very many": (
        raw("/detokenize", json.dumps({"model": "consort", "tokens": [7] * 5_000_000})),
        413,
        None,
    ),
    "detokenized, many": (raw("/detokenize", json.dumps({"model": "consort", "tokens": [7] * 1_000_000})), 400, None),
    "wrong ids": (raw("/detokenize", json.dumps({"model": "consort", "tokens": [-1] * 190_000})), 400, "tokens.0"),
    "tokenized": (raw("/tokenize", json.dumps({"model": "consort", "prompt": "x, y" * 1_400_000})), 400, "prompt"),
    "timeout": (completion(timeout_s=1e-9), 400, "timeout_s"),
}
SERVED: dict[str, tuple[str, bytes]] = {
    "32k prompt ids": completion(prompt=IDS[:32_000]),
    "1000 prompt ids": completion(prompt=IDS[:1000]),
    "32k tokens of text": completion(prompt="the " * 15_000),
    "4 MB of messages that fit": chat(messages=[user([{"type": "text", "text": ""}] * 40_000), *[user("x")] * 1000]),
    "a history": chat(messages=[user("hi, you"), {"role": "assistant", "content": "yes"}] * 1500),
    "logit_bias of 300": completion(logit_bias={str(i): 1 for i in range(6, 306)}, n=128),
    "bad_words": completion(bad_words=["some words " * 8 + str(i) for i in range(1000)]),
    "token ids for 128": completion(allowed_token_ids=list(range(6, 2000)) * 16, n=128),
    "log-probabilities of 16 prompts": completion(prompt=IDS[:900], n=16, prompt_logprobs=20),
    "echoed log-probabilities": completion(prompt=[IDS[:2000]] * 8, echo=True, logprobs=20, max_tokens=4),
    "32k prompt with log-probabilities": completion(prompt=IDS[:32_000], prompt_logprobs=10),
    "the same in a stream": completion(prompt=IDS[:900], n=16, prompt_logprobs=20, stream=True),
    "echo for 128": completion(prompt=IDS[:3000], n=128, echo=True),
    "a long answer": chat(logprobs=True, top_logprobs=20, max_tokens=4000),
    "a long answer in a stream": chat(logprobs=True, top_logprobs=20, max_tokens=2000, stream=True),
    "many answers": completion(n=64, max_tokens=300),
    "a long response": responses(input="x", top_logprobs=20, max_output_tokens=5000),
    "a long response in a stream": responses(input="x", top_logprobs=20, max_output_tokens=3000, stream=True),
    "large tools": responses(input="x", tools=[BIG_TOOL], tool_choice="none", stream=True),
    "detokenized": raw("/detokenize", json.dumps({"model": "consort", "tokens": [7] * 190_000})),
    "tokenized": raw(
        "/tokenize", json.dumps({"model": "consort", "prompt": "the " * 19_000, "return_token_strs": True})
    ),
}


def watch(server: httpx.Client) -> dict[str, float]:
    watched: dict[str, float] = server.get("/watch").raise_for_status().json()
    return watched


def send(server: httpx.Client, path: str, body: bytes) -> tuple[httpx.Response, float, float]:
    """Return the answer, the longest stall in seconds, and the growth of memory in bytes."""
    watch(server)
    time.sleep(0.02)
    before = watch(server)["bytes"]
    reply = server.post(path, content=body, headers={"Content-Type": "application/json"})
    after = watch(server)
    print(f"{reply.status_code} {after['stall_s']:.3f} s, {(after['bytes'] - before) / 2**20:.0f} MiB")
    return reply, after["stall_s"], after["bytes"] - before


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_at_once(server: httpx.Client, name: str) -> None:
    (path, body), status, field = REFUSED[name]
    reply, stall_s, growth = send(server, path, body)
    error = reply.json()["error"]
    assert reply.status_code == status, reply.text[:500]
    assert field is None or error["param"] == field, error
    assert len(reply.content) < 10_000
    assert stall_s < LONGEST_STALL_S + MARGIN_S
    assert growth < MOST_GROWTH_BYTES


@pytest.mark.parametrize("name", SERVED)
def test_what_is_large_is_served_beside_others(server: httpx.Client, name: str) -> None:
    reply, stall_s, growth = send(server, *SERVED[name])
    assert reply.status_code == 200, reply.text[:500]
    assert stall_s < LONGEST_STALL_S + MARGIN_S
    assert growth < MOST_GROWTH_BYTES


@pytest.mark.parametrize(
    "path", ["/page" + "/v1/" * 8000 + "%0a", "/v1/models/" + "x" * 60_000, "/page/" + "x" * 60_000]
)
def test_a_url_costs_next_to_nothing(server: httpx.Client, path: str) -> None:
    watch(server)
    assert server.get(path).status_code == 404
    assert watch(server)["stall_s"] < LONGEST_STALL_S
