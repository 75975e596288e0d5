"""The typed client against a scripted server."""

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from consort import Client, InvalidRequestError, SamplingParams, ToolCall, UnavailableError
from consort.text_model import Prompt
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
SPECULATION = {"steps": 1, "drafted": 4, "accepted": 1}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Handler(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send({"data": [{"id": "big"}, {"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body.get("temperature", 0) < 0:
            self.send({"error": {"message": "temperature must not be below 0.", "param": "temperature"}}, 400)
        elif body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for chunk in self.chunks(body):
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.send({"choices": [self.choice(body)], "usage": USAGE, "speculation": SPECULATION, "seed": 9})

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in body:
            return {"index": 0, "finish_reason": "stop", "stop_reason": "\n", "text": f"after {body['prompt']}"}
        message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]}
        return {"index": 0, "finish_reason": "tool_calls", "message": message}

    def chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if "prompt" in body:
            pieces: list[dict[str, Any]] = [{"text": "a"}, {"text": "b", "finish_reason": "length"}]
        else:
            pieces = [{"delta": {"reasoning_content": "Hm.", "content": ""}}, {"delta": {"content": "Hi"}}]
        return [*({"choices": [{"index": 0, **piece}]} for piece in pieces), {"choices": [], "usage": USAGE}]

    def send(self, document: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_texts(url: str) -> None:
    prompts: list[Prompt] = ["one", [5, 6]]
    answers = Client(url).generate(prompts, SamplingParams(max_tokens=2, stop=("\n",), logit_bias={7: 1.5}))
    assert [answer.text for answer in answers] == ["after one", "after [5, 6]"]
    assert (answers[0].prompt_tokens, answers[0].drafted, answers[0].accepted, answers[0].seed) == (3, 4, 1, 9)
    assert answers[0].choices[0].stop_reason == "\n"
    expected = {"model": "big", "strict": True, "max_tokens": 2, "stop": ["\n"], "logit_bias": {"7": 1.5}}
    assert sorted(Handler.asked, key=str) == sorted(({**expected, "prompt": prompt} for prompt in prompts), key=str)


def test_a_client_closes_as_a_model_does(url: str) -> None:
    with Client(url) as client:
        assert client.generate("one")[0].text == "after one"
    client.close()


def test_conversations(url: str) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    answer = Client(url, model="small").chat(
        [{"role": "user", "content": "1 + 1?"}], SamplingParams(logprobs=2), tools=[tool], tool_choice="required"
    )
    assert answer.text == ""
    assert answer.tool_calls == [ToolCall("call-1", "add", '{"a": 1}')]
    assert answer.choices[0].reasoning == "Hm."
    (asked,) = Handler.asked
    assert (asked["model"], asked["logprobs"], asked["top_logprobs"]) == ("small", True, 2)
    assert (asked["tools"], asked["tool_choice"]) == ([tool], "required")


def test_streams(url: str) -> None:
    pieces = list(Client(url).stream("one"))
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a", None), ("b", "length")]
    turns = list(Client(url).stream_chat([{"role": "user", "content": "Hello"}]))
    assert [(piece.text, piece.reasoning) for piece in turns] == [("", "Hm."), ("Hi", None)]


def test_errors(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="temperature") as caught:
        Client(url).generate("one", SamplingParams(temperature=-1))
    assert caught.value.field == "temperature"
    with pytest.raises(UnavailableError, match="no Consort server answers at"):
        Client("http://127.0.0.1:9").models()


def test_every_parameter_is_a_field_of_both_routes() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names <= CompletionRequest.model_fields.keys()
    assert names <= ChatRequest.model_fields.keys()
