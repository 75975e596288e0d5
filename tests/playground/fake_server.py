"""A server that streams made-up answers in the shape of Consort's, so that the page can be tried without models."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deployments.http.page import add_page

Step = list[tuple[str, str]]  # text and source of each token

STEPS: list[Step] = [
    [("def", "plain")],
    [(" add", "accepted"), ("(a", "accepted"), (", b", "accepted"), ("):", "bonus")],
    [("\n    ", "accepted"), ("return", "recovered")],
    [(" a", "accepted"), (" +", "accepted"), (" c", "recovered")],
    [(" *", "recovered")],
    [(" b", "accepted"), ("\n", "bonus")],
]
TEXT = "".join(text for step in STEPS for text, _ in step)
SPECULATION: dict[str, Any] = {
    "steps": 6,
    "drafted": 12,
    "accepted": 7,
    "acceptance_rate": 0.5833,
    "acceptance_length": 2.1667,
}
SPECULATION |= {"proposers": {"ngram": {"drafted": 2, "accepted": 1}, "drafter": {"drafted": 10, "accepted": 6}}}
MEMBERS = [
    {"model": "qwen", "answered": True, "weight": 0.75, "tokens": 13, "agreement": 0.9, "latency_ms": 0.0},
    {"model": "llama", "answered": False, "weight": 0.25, "tokens": 5, "agreement": None, "latency_ms": 2.5},
]
MARKDOWN = """### A *sum*

1. **Add** the `numbers`, then
2. return it; see [this](https://example.org/a) or [that](javascript:alert(1)).

```python
def add(a: int, b: int) -> int:
    return a + b  # the sum
```

<img src="x" onerror="window.hacked = true"><script>window.hacked = true</script>
![picture](https://example.org/picture.png)

| a | b |
|---|---|
| 1 | 2 |
"""
REASONING = ["First", ", add", " them."]
STATUS = {
    "status": "ready",
    "version": "0",
    "uptime_s": 10.0,
    "requests": {"running": 1, "waiting": 2, "max": 64},
    "models": [
        {"model": "target", "wanted": 2, "running": 1, "reason": "1 can't be placed", "last_restart": None},
        {"model": "drafter", "wanted": 1, "running": 1, "reason": None}
        | {"last_restart": {"at_s": 1.8e9, "reason": "its node died"}},
    ],
    "endpoints": [
        {"name": "first", "totals": {"tokens": 120, "drafted": 40, "accepted": 30}, "predicted_wait_s": 4.2}
        | {"proposers": [{"name": "drafter", "acceptance_rate": 0.75, "time_share": None}]}
    ],
    "replicas": [
        {"name": "target-0", "model": "target", "role": "target", "running": 3, "waiting": 2, "slots": 4}
        | {"kv_usage": 0.25, "drafting": False, "speculation_gain": 0.82}
        | {"weights": {"version": "2-5f0c2a9e", "asleep": True, "error": None}},
        {"name": "drafter-0", "model": "drafter", "role": "drafter", "running": 0, "waiting": 0, "slots": 4}
        | {"kv_usage": 0.0, "drafting": None, "speculation_gain": None, "weights": None},
    ],
}
CANDIDATES = [{"model": "llama", "index": 0, "text": "Four.\nOr *five*."}, {"model": "qwen", "index": 0, "text": "4"}]
CALLS = [("call-1", "weather", ['{"city"', ': "Ulm"}']), ("call-2", "clock", ["{}"])]  # id, name, pieces of arguments
CACHED_SEED = 99
KEY = "open sesame"


@dataclass(slots=True)
class Fake:
    """What the server was asked, and whether it was left alone in the midst of an answer."""

    url: str = ""
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)


def make_fake(fake: Fake) -> FastAPI:
    """Prompts say what happens: `endless`, `differ`, `break`, `ensemble`, `panel`, `call`, `markdown`, `reason`,
    `rest`, `cut`.

    A prompt that says `too long` is refused, and so is a temperature above 2.
    """
    api = FastAPI()
    add_page(api)

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        if fake.key is not None and request.headers.get("Authorization") != f"Bearer {fake.key}":
            return refusal(401, "A valid API key is needed.")
        card = {"target": "target", "drafter": "drafter", "draft_length": 4, "context_length": 1024, "ready": True}
        blend = {**card, "members": ["qwen", "llama"], "strategy": None}
        return JSONResponse({"data": [{"id": "first", **card}, {"id": "second", **card}, {"id": "blend", **blend}]})

    @api.get("/v1/templates")
    async def templates() -> Response:
        card = {"id": "translate", "template": "{{ text }} in {{ language }}", "variables": ["language", "text"]}
        return JSONResponse({"data": [card]})

    @api.get("/v1/status")
    async def status() -> Response:
        return JSONResponse(STATUS)

    @api.post("/v1/{kind:path}")
    async def answer(kind: str, request: Request) -> Response:
        body = await request.json()
        fake.bodies.append(body)
        if body.get("temperature", 0) > 2:
            return refusal(400, "temperature: should be at most 2", "temperature")
        if "too long" in json.dumps(body.get("messages") or body.get("prompt")):
            return refusal(400, "messages: 2000 tokens, but at most 1024 fit.", "messages")
        chunks = chat_chunks if kind == "chat/completions" else completion_chunks
        headers = {"X-Consort-Cache": "hit" if body.get("seed") == CACHED_SEED else "miss"}
        return StreamingResponse(_events(fake, body, chunks(body)), media_type="text/event-stream", headers=headers)

    return api


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "param": param, "code": None}}, status)


def steps_of(body: dict[str, Any], prompt: str) -> Iterator[Step]:
    if "endless" in prompt:
        yield from itertools.repeat([("on", "accepted"), (" and ", "bonus")])
    if "markdown" in prompt:
        pieces = [MARKDOWN[start : start + 3] for start in range(0, len(MARKDOWN), 3)]
        for first, second in itertools.zip_longest(pieces[::2], pieces[1::2], fillvalue=""):
            yield [(first, "accepted"), (second, "bonus")]
        return
    if body.get("speculate") is False or "rest" in prompt:
        yield from ([(text, "plain")] for step in STEPS for text, _ in step)
        if "differ" in prompt:
            yield [("!", "plain")]
    else:
        yield from STEPS


def details(body: dict[str, Any], step: Step) -> list[dict[str, Any]]:
    blends = body["model"] == "blend"
    proposers = {" add": "ngram", "(a": "drafter"}
    return [
        {"id": len(text), "text": text, "source": source}
        | ({"members": thoughts(text)} if blends else {})
        | ({"proposer": proposers[text]} if text in proposers else {})
        for text, source in step
    ]


def thoughts(text: str) -> list[dict[str, Any]]:
    """What members think of a token: they agree on those with a space; `return` is qwen's, the others are llama's."""
    agreed, qwens = " " in text, text == "return"
    share = 0.9 if qwens else 0.2
    return [
        {"model": "qwen", "logprob": -0.5, "agreed": agreed or qwens, "share": share},
        {"model": "llama", "logprob": -0.25, "agreed": agreed or not qwens, "share": 1 - share},
    ]


def chat_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompt = body["messages"][-1]["content"]
    if body.get("continue_final_message"):
        yield {"delta": {"content": " More."}, "token_details": details(body, [(" More.", "plain")])}
        return
    if "call" in prompt:
        yield {"delta": {"content": "Well. "}, "token_details": details(body, [("Well. ", "plain")])}
        yield from call_chunks(body)
        return
    if "reason" in prompt:
        for text in REASONING:
            delta = {"content": "", "reasoning_content": text}
            yield {"delta": delta, "token_details": details(body, [(text, "accepted")])}
    for step in steps_of(body, prompt):
        logprobs = None
        if body.get("logprobs"):
            tops = [{"token": name, "logprob": logprob} for name, logprob in ((" x", -0.1), (" y", -2.5))]
            logprobs = {"content": [{"token": text, "logprob": -0.1, "top_logprobs": tops} for text, _ in step]}
        text = "".join(text for text, _ in step)
        yield {"delta": {"content": text}, "logprobs": logprobs, "token_details": details(body, step)}


def call_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each call's name first, then its arguments in pieces, while tokens tell what the model wrote."""
    for index, (call_id, name, pieces) in enumerate(CALLS):
        begin = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        calls = [begin, *({"index": index, "function": {"arguments": piece}} for piece in pieces)]
        for call, text in zip(calls, ["<tool_call>", *pieces], strict=True):
            yield {"delta": {"tool_calls": [call]}, "token_details": details(body, [(text, "accepted")])}


def completion_chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in steps_of(body, body["prompt"]):
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = {
                "tokens": [text for text, _ in step],
                "token_logprobs": [-0.1] * len(step),
                "top_logprobs": [{" y": -2.5, " x": -0.1}] * len(step),
            }
        text = "".join(text for text, _ in step)
        yield {"text": text, "logprobs": logprobs, "token_details": details(body, step)}


async def _events(fake: Fake, body: dict[str, Any], choices: Iterator[dict[str, Any]]) -> AsyncIterator[str]:
    prompt = json.dumps(body.get("messages") or body.get("prompt"))
    rests = body.get("speculate") is False or "rest" in prompt
    speculation = {**SPECULATION, "drafted": 0, "accepted": 0, "proposers": {}} if rests else SPECULATION
    called = False
    try:
        if "panel" in prompt:
            for done, candidate in enumerate(CANDIDATES, 1):
                progress = {"event": "candidate", "done": done, "total": 2, **candidate}
                yield _event({"choices": [{"index": 0, "delta": {"content": ""}}], "progress": progress})
        for count, choice in enumerate(choices):
            if "break" in prompt and count == 2:
                yield 'event: error\ndata: {"error": {"message": "no target is left", "param": null}}\n\n'
                return
            called = called or "tool_calls" in choice.get("delta", ())
            for index in range(body.get("n", 1)):
                yield _event({"choices": [{"index": index, "finish_reason": None, **choice}]})
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        fake.hung_up.set()
        raise
    cut = "cut" in prompt and not body.get("continue_final_message")
    reason = "tool_calls" if called else "length" if cut else "stop"
    last: dict[str, Any] = {"finish_reason": reason, "text": "", "delta": {"content": ""}, "token_details": []}
    if "ensemble" in prompt:
        last["ensemble"] = {"blend": "mixture", "members": MEMBERS}
    if "panel" in prompt:
        last["ensemble"] = {
            "strategy": "synthesize",
            "writer": {"model": "qwen"},
            "members": MEMBERS,
            "candidates": CANDIDATES[::-1],
        }
    ends = [_event({"choices": [{"index": index, **last}]}) for index in range(body.get("n", 1))]
    yield "".join(ends)
    yield _event({"choices": [], "speculation": speculation, "seed": body.get("seed", 7)})
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The fake on a free port of this machine."""
    config = uvicorn.Config(make_fake(fake), port=0, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    try:
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
