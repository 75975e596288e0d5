"""The requests of a connected Open WebUI, with the fields that it sends."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.server.conftest import Server
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer anything",
    "X-OpenWebUI-User-Name": "Ada%20Lovelace",
    "X-OpenWebUI-Chat-Id": "5b4ff0a2-6c5c-4f0e-8f43-3a51cf0e9d5a",
}
CHAT = {
    "stream": True,
    "model": "consort",
    "messages": [
        {"role": "system", "content": "You answer questions about Python."},
        {"role": "user", "content": [{"type": "text", "text": "What does close in the module socket do?"}]},
    ],
    "stream_options": {"include_usage": True},
}
# A model's advanced parameters are passed on; those of Ollama's, which have no meaning here, among them.
PARAMETERS: dict[str, Any] = {
    "max_tokens": 16,
    "temperature": 0.0,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 0,
    "stop": ["<end>"],
    "logit_bias": {"5": -100},
    "reasoning_effort": "medium",
    "repeat_penalty": 1.1,
    "num_ctx": 4096,
    "keep_alive": "5m",
}
TASK = "Write a JSON object with a title for this chat."
TASKS: dict[str, dict[str, Any]] = {
    "title": {"max_completion_tokens": 1000},
    "title, in JSON mode": {"max_completion_tokens": 200, "response_format": {"type": "json_object"}},
    "title, of an older version": {"max_tokens": 50},
    "tags": {},
    "autocompletion": {"temperature": 0.3, "frequency_penalty": 0.2, "stop": ["\n"]},
}


def post(server: Server, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=180)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
    return connection, connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def test_the_models_are_listed_for_its_menu(server: Server) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=180)) as connection:
        connection.request("GET", "/v1/models", headers=HEADERS)
        document = json.load(connection.getresponse())
    assert document["object"] == "list"
    assert [(card["id"], card["object"], card["owned_by"]) for card in document["data"]] == [
        ("consort", "model", "consort")
    ]


def test_a_chat_streams_with_its_usage_at_the_end(server: Server) -> None:
    connection, response = post(server, CHAT)
    with closing(connection):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        *chunks, done = events(response)
    parsed = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert parsed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in parsed[:-1])
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] > 0


def test_its_parameters_are_taken_and_those_without_effect_are_named(server: Server) -> None:
    connection, response = post(server, {**CHAT, **PARAMETERS, "chat_id": "5b4ff0a2"})
    with closing(connection):
        assert response.status == 200, response.read()
        *_, last, _ = events(response)
    ignored = response.headers["X-Consort-Ignored-Fields"].split(", ")
    assert set(ignored) == {"reasoning_effort", "repeat_penalty", "num_ctx", "keep_alive", "chat_id"}
    assert 0 < json.loads(last)["usage"]["completion_tokens"] <= PARAMETERS["max_tokens"]


@pytest.mark.parametrize("task", TASKS)
def test_its_own_tasks_get_an_answer(server: Server, task: str) -> None:
    body = {"model": "consort", "messages": [{"role": "user", "content": TASK}], "stream": False, **TASKS[task]}
    connection, response = post(server, body)
    with closing(connection):
        document = json.load(response)
    assert response.status == 200, document
    choice = document["choices"][0]
    assert choice["message"]["role"] == "assistant"
    if "response_format" in body and choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_the_stop_button_ends_the_answer(server: Server) -> None:
    wait_until(lambda: server.busy() == 0, "the server is idle")
    connection, response = post(server, {**CHAT, "ignore_eos": True})
    with closing(connection):
        next(events(response))
    wait_until(lambda: server.busy() == 0, "all slots are free", timeout_s=5)
    deadline_s = time.monotonic() + 5
    while server.client.document("/v1/status")["requests"]["running"] and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert server.client.document("/v1/status")["requests"] == {"running": 0, "waiting": 0, "max": 256}
