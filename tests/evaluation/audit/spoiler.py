"""A proxy that spoils the answers of the application behind it, each fault in a way of its own."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Document = dict[str, Any]
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Fault:
    """What is wrong. Both functions change what they get."""

    check: str  # that should see it
    request: Callable[[Document], object] | None = None
    answer: Callable[[Document, list[Document]], object] | None = None  # what was asked; all chunks, or the whole
    company_only: bool = False
    cut: bool = False  # streams lack their end


class Spoiler:
    """Stands before an application. `fault`: None: passes on what it gets."""

    def __init__(self, application: ASGIApp) -> None:
        self._application, self._running = application, 0
        self.fault: Fault | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self.fault
        if fault is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._application(scope, receive, send)
            return
        self._running += 1
        try:
            await self._spoiled(fault, scope, await _read(receive), send)
        finally:
            self._running -= 1

    async def _spoiled(self, fault: Fault, scope: Scope, content: bytes, send: Send) -> None:
        try:
            asked = json.loads(content)
        except ValueError:
            asked = {}
        if fault.request is not None and asked:
            fault.request(asked)
            content = json.dumps(asked).encode()
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope["headers"].append((b"content-length", str(len(content)).encode()))
        messages: list[Message] = []
        given = iter([{"type": "http.request", "body": content, "more_body": False}])
        in_company = False

        async def replay() -> Message:
            return next(given, {"type": "http.disconnect"})

        async def keep(message: Message) -> None:
            nonlocal in_company
            in_company |= self._running > 1
            messages.append(message)

        await self._application(scope, replay, keep)
        start, body = messages[0], b"".join(message.get("body", b"") for message in messages[1:])
        if not fault.company_only or in_company:
            body = _changed(fault, asked, body)
        start["headers"] = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        await send(start)
        await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            return content


def _changed(fault: Fault, asked: Document, body: bytes) -> bytes:
    if not body.startswith(b"data:"):
        documents = [json.loads(body)]
        if fault.answer is not None:
            fault.answer(asked, documents)
        return json.dumps(documents[0]).encode()
    events = [event.removeprefix(b"data: ") for event in body.removesuffix(_DONE).split(b"\n\n") if event]
    documents = [json.loads(event) for event in events]
    if fault.answer is not None:
        fault.answer(asked, documents)
    if fault.cut:
        return b"".join(b"data: %s\n\n" % json.dumps(document).encode() for document in documents[:-2])
    return b"".join(b"data: %s\n\n" % json.dumps(document).encode() for document in documents) + _DONE


def _other_text(documents: list[Document], choice: int = 0) -> None:
    """Replace a letter of an answer's first piece."""
    for document in documents:
        for part in document.get("choices", ()):
            if part["index"] == choice and part.get("text"):
                part["text"] = part["text"][:-1] + ("?" if part["text"][-1] != "?" else "!")
                return


def once_in(tokens: int) -> Callable[[Document, list[Document]], None]:
    """Spoil a token of the answer in which so many tokens have been written since the last time."""
    written = itertools.count(1)

    def spoil(_: Document, documents: list[Document]) -> None:
        counts = [(document.get("usage") or {}).get("completion_tokens", 0) for document in documents]
        numbers = [next(written) for _ in range(max(counts))]
        if any(number % tokens == 0 for number in numbers):
            _other_text(documents)

    return spoil


def _usage(_: Document, documents: list[Document]) -> None:
    for document in documents:
        if document.get("usage"):
            document["usage"]["completion_tokens"] += 1
            document["usage"]["total_tokens"] += 1


def _repeated_chunk(_: Document, documents: list[Document]) -> None:
    if len(documents) > 1:
        documents.insert(1, documents[1])


def _moved_logprobs(_: Document, documents: list[Document]) -> None:
    for document in documents:
        for part in document.get("choices", ()):
            for name in ("token_logprobs", "top_logprobs"):
                if values := (part.get("logprobs") or {}).get(name):
                    values.insert(0, values.pop())


def _broken_json(asked: Document, documents: list[Document]) -> None:
    for part in documents[0].get("choices", ()) if "response_format" in asked else ():
        if "message" in part:
            part["message"]["content"] = part["message"]["content"][:-1]


def _copied_choice(_: Document, documents: list[Document]) -> None:
    parts = documents[0].get("choices", ())
    if len(parts) > 2:
        parts[2] |= {name: parts[1][name] for name in ("text", "finish_reason")}


def _finish(_: Document, documents: list[Document]) -> None:
    for document in documents:
        for part in document.get("choices", ()):
            if part.get("finish_reason"):
                part["finish_reason"] = "length"


def _same_id(_: Document, documents: list[Document]) -> None:
    for document in documents:
        document["id"] = "cmpl-1"


def _other_call(asked: Document, documents: list[Document]) -> None:
    for part in documents[0].get("choices", ()) if "tools" in asked else ():
        for call in part.get("message", {}).get("tool_calls", ()):
            call["function"]["name"] = "remember"


def _with_drafts(asked: Document, documents: list[Document]) -> None:
    if asked.get("speculate", True):
        _other_text(documents)


def _total(asked: Document, documents: list[Document]) -> None:
    if asked.get("n", 1) > 1:
        documents[0]["usage"] |= {"completion_tokens": 16, "total_tokens": 16 + documents[0]["usage"]["prompt_tokens"]}


seeds = itertools.count(100)
FAULTS = {
    "another token once in 20": lambda: Fault("greedy, repeated", answer=once_in(20)),
    "a lost stop": lambda: Fault("stop strings", request=lambda asked: asked.pop("stop", None)),
    "a wrong count": lambda: Fault("usage", answer=_usage),
    "a count of one choice": lambda: Fault("n choices", answer=_total),
    "a stream cut off": lambda: Fault("streams", cut=True),
    "a chunk sent twice": lambda: Fault("streams", answer=_repeated_chunk),
    "a seed ignored": lambda: Fault("seed, repeated", request=lambda asked: asked.update(seed=next(seeds))),
    "a seed for all": lambda: Fault("another seed", request=lambda asked: asked.update(seed=1)),
    "log-probabilities moved": lambda: Fault("scoring", answer=_moved_logprobs),
    "JSON that lacks its end": lambda: Fault("JSON schema", answer=_broken_json),
    "a choice copied": lambda: Fault("n choices", answer=_copied_choice),
    "another text in company": lambda: Fault(
        "in company", answer=lambda _, documents: _other_text(documents), company_only=True
    ),
    "another text with drafts": lambda: Fault("without drafts", answer=_with_drafts),
    "a token too many": lambda: Fault(
        "max_tokens", request=lambda asked: asked.update(max_tokens=asked.get("max_tokens", 0) + 1)
    ),
    "a wrong end": lambda: Fault("stop strings", answer=_finish),
    "one id for all": lambda: Fault("identifiers", answer=_same_id),
    "another function called": lambda: Fault("tool calls", answer=_other_call),
    "an error without a message": lambda: Fault("errors", answer=lambda _, documents: documents[0].pop("error", None)),
}
