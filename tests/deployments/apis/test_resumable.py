"""A stream that was cut anywhere goes on after its last event, however the steps fall the second time."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from actors.coordinator.request import Delta, Request
from deployments.apis.resumable import EventId
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.deployments.scripted import TOOLS, Scripted

BODY = {"model": "consort", "prompt": "import os", "max_tokens": 12, "stream": True}
CHAT = {"model": "consort", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "stream": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**BODY, "seed": 3}),
    ("/v1/completions", {**BODY, "seed": 3, "logprobs": 2, "return_token_details": True}),
    ("/v1/completions", {**BODY, "prompt": ["import os", "import sys"], "n": 2, "seed": 3, "echo": True}),
    ("/v1/chat/completions", {**CHAT, "seed": 3, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT),  # the seed is in the events' ids
]


class OtherSteps(FakeCoordinator):
    """Makes the same tokens, as many at a time as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = 1

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        deltas = answer(request)
        for start in range(0, len(deltas), self.joined):
            sink(_joined(deltas[start : start + self.joined]))


def _joined(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.tokens],
        last.statistics,
        deltas[0].prompt_logprobs,
        last.finish,
        stop_reason=last.stop_reason,
    )


def events(client: TestClient, path: str, body: dict[str, Any], last_id: str | None = None) -> list[tuple[str, str]]:
    """Id and data of each event."""
    reply = client.post(path, json=body, headers={"Last-Event-ID": last_id or "0"})
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.split("\n\n")[:-1]]
    assert all(block[0].startswith("id: ") and block[1].startswith("data: ") for block in blocks), blocks
    return [(block[0][4:], block[1][6:]) for block in blocks]


def contents(stream: list[tuple[str, str]]) -> dict[int, dict[str, Any]]:
    """What a client puts together, by choice, and what it is told at the end, under −1."""
    whole: dict[int, dict[str, Any]] = {-1: {}}
    for _, data in stream:
        if data == "[DONE]":
            whole[-1]["done"] = whole[-1].get("done", 0) + 1
            continue
        chunk = json.loads(data)
        whole[-1].setdefault("ids", set()).add((chunk["id"], chunk["created"]))
        for name in ("usage", "seed"):
            if chunk.get(name) is not None:
                whole[-1][name] = chunk[name]
        for choice in chunk["choices"]:
            joined = whole.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "calls": ""})
            delta = choice.get("delta", choice)
            joined["text"] += delta.get("content") or delta.get("text") or ""
            joined["role"] = joined.get("role", 0) + ("role" in delta)
            for call in delta.get("tool_calls") or ():
                joined["calls"] += call["function"].get("name") or ""
                joined["calls"] += call["function"].get("arguments") or ""
            details = choice.get("token_details") or ()
            joined["tokens"] += [(token["id"], token["source"], token.get("proposer")) for token in details]
            joined["logprobs"] += (choice.get("logprobs") or {}).get("text_offset", [])
            joined["finish"] = choice["finish_reason"]
    return whole


@pytest.fixture
def server(endpoints: dict[str, ServedEndpoint]) -> Any:
    coordinator: Any = OtherSteps()
    with TestClient(make_api(Service(endpoints, coordinator))) as client:
        yield client, coordinator


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_it_goes_on_after_any_event(server: tuple[TestClient, OtherSteps], path: str, body: dict[str, Any]) -> None:
    client, coordinator = server
    undisturbed = events(client, path, body)
    expected = contents(undisturbed)
    assert len({event_id for event_id, _ in undisturbed}) == len(undisturbed)
    for joined in (1, 2, 99):
        coordinator.joined = joined
        for cut in range(1, len(undisturbed) + 1):
            before = undisturbed[:cut]
            after = events(client, path, body, before[-1][0])
            assert contents([*before, *after]) == expected, (joined, cut)


def test_tool_calls_go_on_too(scripted: tuple[TestClient, Scripted]) -> None:
    client, _ = scripted
    body = {**CHAT, "tools": TOOLS, "seed": 1}
    undisturbed = events(client, "/v1/chat/completions", body)
    assert contents(undisturbed)[0]["calls"].startswith("weather")
    for cut in range(1, len(undisturbed)):
        again = events(client, "/v1/chat/completions", body, undisturbed[cut - 1][0])
        assert [event_id for event_id, _ in again] == [event_id for event_id, _ in undisturbed[cut:]]
        assert contents([*undisturbed[:cut], *again]) == contents(undisturbed)


@pytest.mark.parametrize(
    ("header", "change"),
    [
        ("7", {}),
        ("x" * 5000, {}),
        (f"{'a' * 24}.1.3/0:0,0:0+1", {}),  # of two choices
        (f"{'a' * 24}.1.3/1:2+0", {"seed": 4}),
        (f"{'a' * 24}.1.3/1:2+0", {"stream": False}),
    ],
)
def test_an_id_of_something_else_is_refused(
    server: tuple[TestClient, OtherSteps], header: str, change: dict[str, Any]
) -> None:
    reply = server[0].post("/v1/completions", json={**BODY, "seed": 3, **change}, headers={"Last-Event-ID": header})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_request_that_rejects_drafts_is_not_resumed(server: tuple[TestClient, OtherSteps]) -> None:
    body = {**BODY, "seed": 3, "verification": "rejection"}
    assert "id: " not in server[0].post("/v1/completions", json=body, headers={"Last-Event-ID": "0"}).text


def test_ids_are_read_as_they_are_written() -> None:
    text = f"{'0a' * 12}.6740f0c1.ff/12:40,3:9e+2"
    assert str(EventId.parse(text)) == text
