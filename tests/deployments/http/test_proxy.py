"""What clients get from Serve's proxy when a coordinator dies."""

import json

import pytest
from fastapi.testclient import TestClient
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Message, Receive, Scope, Send

from deployments.http import proxy
from deployments.http.proxy import CoordinatorLossMiddleware


def answer(*messages: Message, path: str = "/v1/completions") -> tuple[int, dict[str, str], str]:
    """Return status, headers and body if the application sends these messages and returns, as Serve's does."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    reply = TestClient(CoordinatorLossMiddleware(application)).post(path, headers={"X-Request-Id": "mine"})
    return reply.status_code, dict(reply.headers), reply.text


def start(kind: str) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


def body(text: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


STREAM = start("text/event-stream; charset=utf-8")


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    _, _, text = answer(STREAM, body(b"data: 1\n\n", more=True))
    first, last = text.split("\n\n", 1)
    assert first == "data: 1"
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["code"] == "unavailable"
    _, _, text = answer(STREAM, path="/v1/responses")
    assert json.loads(text.split("data: ")[1])["type"] == "error"


def test_an_answer_that_never_began_is_a_503() -> None:
    status, headers, text = answer()
    assert (status, headers["x-request-id"]) == (503, "mine")
    assert int(headers["retry-after"]) > 0
    assert json.loads(text)["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    "messages", [[STREAM, body(b"data: [DONE]", more=False)], [start("x"), body(b"y", more=False)]]
)
def test_whole_answers_pass(messages: list[Message]) -> None:
    status, _, text = answer(*messages)
    assert (status, text) == (200, messages[-1]["body"].decode())


def test_serve_finds_it() -> None:
    (middleware,) = call_function_from_import_path(proxy.CALLBACK)
    assert middleware.cls is CoordinatorLossMiddleware
