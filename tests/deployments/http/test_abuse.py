"""What a hostile client sends, on a server with keys: no error but 503, no stall of others, no growth of memory."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.deployments.http.test_stalls import LONGEST_STALL_S, MARGIN_S, chat, completion, nested, raw, user, watch
from tests.deployments.watched_client import SECRET, watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEEP = 10_000
ROUNDS = 3
MOST_GROWTH_BYTES = 32 * 2**20  # of a round after the first
FINE = {"model": "consort", "prompt": "x", "max_tokens": 100, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with watched(authenticated=True) as client:
        client.post("/v1/completions", json={"model": "consort", "prompt": "x", "max_tokens": 5}).raise_for_status()
        yield client


def structured(**structure: Any) -> tuple[str, bytes]:
    return completion(structured_outputs=structure)


def laughs(levels: int) -> dict[str, Any]:
    """A schema of few definitions, each of which names the next one ten times."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(levels)}
    return {"$defs": definitions | {f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


BRACKETS = "[" * DEEP + "]" * DEEP
BRACES = '{"a":' * DEEP + "1" + "}" * DEEP

LARGE: dict[str, tuple[str, bytes]] = {
    "20 MB of text": completion(prompt="x" * 20_000_000),
    "20 MB of white space": raw("/v1/completions", " " * 20_000_000),
    "20 MB that are no JSON": raw("/v1/chat/completions", "\\" * 20_000_000),
    "6 MB of zeros": raw("/v1/completions", "\0" * 6_000_000),
}
NESTED: dict[str, tuple[str, bytes]] = {
    "lists": raw("/v1/completions", BRACKETS),
    "objects": raw("/v1/completions", BRACES),
    "a prompt of lists": raw("/v1/completions", f'{{"model":"consort","prompt":{BRACKETS}}}'),
    "content": raw("/v1/chat/completions", f'{{"model":"consort","messages":[{{"role":"user","content":{BRACES}}}]}}'),
    "variables": raw(
        "/v1/chat/completions",
        f'{{"model":"consort","messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{BRACES}}}',
    ),
    "a schema": raw("/v1/completions", f'{{"model":"consort","prompt":"x","structured_outputs":{{"json":{BRACES}}}}}'),
    "a schema as text": structured(json=BRACES),
    "an unknown field": raw("/v1/completions", f'{{"model":"consort","prompt":"x","max_tokens":1,"other":{BRACES}}}'),
    "response input": raw("/v1/responses", f'{{"model":"consort","input":{BRACKETS}}}'),
    "a message": raw(
        "/v1/messages",
        f'{{"model":"consort","max_tokens":1,"messages":[{{"role":"user","content":{BRACKETS}}}]}}',
    ),
    "arguments of a call": chat(
        messages=[
            user("x"),
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": BRACES}}],
            },
        ]
    ),
}
BOMBS: dict[str, tuple[str, bytes]] = {
    "counted twice": structured(regex="(a{1,1000}){1,1000}"),
    "counted thrice": structured(regex="((a{1,300}){1,300}){1,300}"),
    "a large count": structured(regex="a{100000000}"),
    "optional ones": structured(regex="(a?){3000}a{3000}"),
    "stars in stars": structured(regex="(((a*)*)*)*b"),
    "any text fifty times": structured(regex="(.*a){50}"),
    "a wide class": structured(regex="[^a]{1,5000}"),
    "groups": structured(regex="(" * DEEP + "a" + ")" * DEEP),
    "alternatives": structured(regex="|".join(f"{'a' * 50}{i}" for i in range(20_000))),
    "choices": structured(choice=[f"choice number {i}" for i in range(50_000)]),
    "billion laughs": structured(json=laughs(10)),
    "a schema of itself": structured(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "a list of itself": structured(json={"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
    "a long string": structured(json={"type": "string", "minLength": 10**9}),
    "a long list": structured(json={"type": "array", "items": {"type": "integer"}, "minItems": 10**8}),
    "wide bounds": structured(json={"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    "multiples": structured(json={"type": "integer", "multipleOf": 10**18 + 9}),
    "properties": structured(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    ),
    "all of them": structured(json={"allOf": [{"pattern": f"^.*{i}.*$"} for i in range(64)]}),
    "patterns": structured(json={"patternProperties": {f"^(.*x){{{i}}}$": {} for i in range(64)}}),
    "a pattern in a schema": structured(json={"type": "string", "pattern": "((a{1,300}){1,300}){1,300}"}),
    "an enum": structured(json={"enum": [f"{i}" * 20 for i in range(50_000)]}),
    "nested 500": structured(json=nested(500)),
    "a rule of itself": structured(grammar="start: start"),
    "left recursion": structured(grammar='start: start "a" | start start | "b"'),
    "ambiguity": structured(grammar="start: a a a a a a a a\na: " + " | ".join(['"x"*'] * 200)),
    "doubling": structured(
        grammar="start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "x"'
    ),
    "brackets": structured(grammar="start: " + "(" * DEEP + '"a"' + ")" * DEEP),
    "many rules": structured(
        grammar="start: r0\n" + "".join(f'r{i}: "{i}" r{i + 1}?\n' for i in range(5000)) + 'r5000: "x"'
    ),
    "a terminal": structured(grammar="start: A\nA: /((a{1,300}){1,300}){1,300}/"),
    "tools": chat(tools=[tool(laughs(10))] * 64, tool_choice="required"),
    "response_format": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": laughs(10)}}
    ),
}


class Stream:
    """A client of a whole, ordinary stream, over and over: each has to come to its end."""

    def __init__(self, server: httpx.Client) -> None:
        self._client = httpx.Client(base_url=server.base_url, headers=server.headers, timeout=60)
        self._stopping, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.texts = set[bytes]()

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            reply = self._client.post("/v1/completions", json=FINE | {"seed": 1})
            parts = [line for line in reply.content.splitlines() if b"choices" in line]
            whole = "".join(json.loads(part[6:])["choices"][0]["text"] for part in parts)
            self.texts.add(b"%d %s %s" % (reply.status_code, whole.encode(), reply.content[-14:]))


def connect(server: httpx.Client) -> socket.socket:
    return socket.create_connection((server.base_url.host, server.base_url.port or 80), timeout=60)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {SECRET}", *lines, "", ""]).encode()


def settled(server: httpx.Client) -> dict[str, float]:
    """What is open once nothing else is, at the latest after 20 s."""
    for _ in range(100):
        now = watch(server)
        if now["tasks"] <= 8:
            break
        time.sleep(0.2)
    return now


@pytest.mark.parametrize("bodies", [LARGE, NESTED, BOMBS], ids=["large", "nested", "bombs"])
def test_no_body_breaks_anything(server: httpx.Client, bodies: dict[str, tuple[str, bytes]]) -> None:
    stalls, sizes, statuses = dict[str, float](), list[float](), dict[str, int]()
    with Stream(server) as stream:
        for _ in range(ROUNDS):
            watch(server)
            most_bytes = 0.0
            for name, (path, body) in bodies.items():
                began_s = time.monotonic()
                reply = server.post(path, content=body, headers={"Content-Type": "application/json"})
                watched_now = watch(server)
                stalls[name] = max(stalls.get(name, 0.0), watched_now["stall_s"])
                most_bytes = max(most_bytes, watched_now["bytes"])
                statuses[name] = reply.status_code
                print(f"{reply.status_code} {watched_now['stall_s']:.3f} s of {time.monotonic() - began_s:.1f}  {name}")
            sizes.append(most_bytes)
    assert set(statuses.values()) <= {200, 400, 413, 503}, statuses
    assert {name: stall for name, stall in stalls.items() if stall > LONGEST_STALL_S + MARGIN_S} == {}
    assert sizes[-1] - sizes[0] < (ROUNDS - 1) * MOST_GROWTH_BYTES, sizes
    assert len(stream.texts) == 1
    assert next(iter(stream.texts)).startswith(b"200 ")
    assert settled(server)["tasks"] <= 8


def test_a_body_without_a_length_is_bounded(server: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 1_000_000

    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/scale"):
        try:
            reply = server.post(path, content=pieces(), headers={"Content-Type": "application/json"})
            assert reply.status_code in (400, 404, 413), path
        except httpx.WriteError:
            pass  # it hung up in the middle, as it may


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/compl",
        head("/v1/completions", "Content-Length: 100"),
        head("/v1/completions", "Content-Length: 100") + b'{"model":',
        head("/v1/completions", "Transfer-Encoding: chunked") + b"5\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
    ],
    ids=["nothing", "half a line", "no body", "half a body", "half a chunk", "headers"],
)
def test_half_open_connections_hinder_nobody(server: httpx.Client, sent: bytes) -> None:
    before = settled(server)
    with Stream(server) as stream, ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(connect(server))
            try:
                connection.sendall(sent)
            except OSError:
                break  # it hung up, as it may
        time.sleep(1)
        assert watch(server)["stall_s"] < LONGEST_STALL_S + MARGIN_S
        assert server.post("/v1/completions", json={**FINE, "stream": False}).status_code == 200
    assert len(stream.texts) == 1
    after = settled(server)
    assert after["tasks"] <= before["tasks"] + 2
    assert after["open_files"] <= before["open_files"] + 4


def test_slow_readers_hinder_nobody(server: httpx.Client) -> None:
    """Each asks for much more than the buffers on the way hold, and reads nothing for seconds."""
    body = json.dumps({**FINE, "max_tokens": 4000, "n": 8, "logprobs": 20}).encode()
    request = head("/v1/completions", "Content-Type: application/json", f"Content-Length: {len(body)}") + body
    sizes = list[float]()
    for _ in range(ROUNDS):
        watch(server)
        with Stream(server), ExitStack() as stack:
            readers = [stack.enter_context(connect(server)) for _ in range(16)]
            for reader in readers:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.sendall(request)
            for _ in range(5):
                time.sleep(1)
                assert readers[0].recv(100)
            assert server.post("/v1/completions", json={**FINE, "stream": False}).status_code in (200, 429)
            now = watch(server)
        print(f"{now['stall_s']:.3f} s, {now['bytes'] / 2**20:.0f} MiB")
        assert now["stall_s"] < LONGEST_STALL_S + MARGIN_S
        sizes.append(now["bytes"])
        assert settled(server)["tasks"] <= 8
    assert sizes[-1] - sizes[0] < (ROUNDS - 1) * MOST_GROWTH_BYTES, sizes


def test_a_wrong_key_gets_nothing_however_it_asks(server: httpx.Client) -> None:
    for value in ("", "Bearer", "Bearer wrong", f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer " + "x" * 60_000):
        reply = server.post("/v1/completions", json=FINE, headers={"Authorization": value})
        assert reply.status_code in (400, 401, 431), value[:20]
