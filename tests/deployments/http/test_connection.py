"""Connections whose clients send too much, too slowly, or half, and those that only look so."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deployments.http import connection
from deployments.http.connection import MOST_HEAD_BYTES, BoundedConnection
from tests.support.waiting import wait_until

HOST = b"Host: x\r\n"


class Impatient(BoundedConnection):
    head_timeout_s = 0.3


class Application:
    """Answers with the length of the body, in pieces without a length; `/held` once it is told to, `/early` at once."""

    def __init__(self) -> None:
        self.may_answer, self.held, self.aborted = threading.Event(), 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, has_more = 0, scope["path"] != "/early"
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.aborted += 1
                return
            size, has_more = size + len(message["body"]), message["more_body"]
        if scope["path"] == "/held" and not await self._may_go_on(receive):
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size, "more_body": True})
        await send({"type": "http.response.body", "body": b" bytes"})

    async def _may_go_on(self, receive: Receive) -> bool:
        """Wait for the test's word or the end of the client."""
        self.held += 1
        leaves = asyncio.ensure_future(receive())
        while not (self.may_answer.is_set() or leaves.done()):  # noqa: ASYNC110 - another thread's event
            await asyncio.sleep(0.01)
        self.aborted += leaves.done()
        return not leaves.done()


class Server:
    """uvicorn over the application, in a thread."""

    def __init__(self, protocol: type[BoundedConnection]) -> None:
        self.application = Application()
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.application, port=0, log_level="critical", http=protocol, lifespan="off", timeout_keep_alive=2
            )
        )
        self.thread = threading.Thread(target=self.uvicorn.run)

    @property
    def address(self) -> tuple[str, int]:
        return self.uvicorn.servers[0].sockets[0].getsockname()

    def connect(self, sent: bytes = b"") -> socket.socket:
        client = socket.create_connection(self.address, timeout=60)
        client.sendall(sent)
        return client

    def ask(self, sent: bytes) -> bytes:
        """Send, and return all that comes until the server closes the connection."""
        with closing(self.connect(sent)) as client:
            return read(client)


def read(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def read_answer(client: socket.socket) -> bytes:
    """Return one answer of the application, in chunks."""
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        received = client.recv(1000)
        assert received, f"ended after {answer!r}"
        answer += received
    return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from run(BoundedConnection)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    yield from run(Impatient)


def run(protocol: type[BoundedConnection]) -> Iterator[Server]:
    server = Server(protocol)
    server.thread.start()
    wait_until(lambda: server.uvicorn.started, "the server listens")
    yield server
    server.uvicorn.should_exit = True
    server.thread.join()


def get(*fields: bytes, path: bytes = b"/", version: bytes = b"1.1") -> bytes:
    return b"GET %s HTTP/%s\r\n%sConnection: close\r\n%s\r\n" % (path, version, HOST, b"".join(fields))


def post(body: bytes, path: bytes = b"/", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path, HOST, size) + body


REQUEST = get().replace(b"Connection: close\r\n", b"")


def status(reply: bytes) -> int:
    return int(reply.split()[1])


LARGE = {
    "one field": get(b"X: %s\r\n" % (b"y" * 1_000_000)),
    "one field that never ends": get(b"X: " + b"y" * 1_000_000)[:-4],
    "many fields": get(b"X: y\r\n" * 20_000),
    "a name": get(b"x" * 100_000 + b": y\r\n"),
    "a target": get(path=b"/" + b"x" * 100_000),
    "trailers": b"POST / HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n0\r\nX: %s" % (HOST, b"y" * 1_000_000),
}


@pytest.mark.parametrize("sent", LARGE.values(), ids=LARGE)
def test_a_large_head_is_refused(server: Server, sent: bytes) -> None:
    reply = server.ask(sent)
    assert status(reply) == 431
    assert b'"code":"head_too_large"' in reply


def test_heads_below_the_bound_pass_again_and_again(server: Server) -> None:
    with httpx.Client(base_url="http://{}:{}".format(*server.address)) as client:
        for size in (1, MOST_HEAD_BYTES - 1000, 10):
            for body in (b"", b"x" * 1_000_000):
                assert client.post("/", headers={"X": "y" * size}, content=body).text == f"{len(body)} bytes"
        pieces = (b"x" for _ in range(20_000))  # each in a chunk of its own, in five bytes more
        assert client.post("/", content=pieces).text == "20000 bytes"


@pytest.mark.parametrize("fields", [b"", HOST + HOST, HOST + b"host: y\r\n"], ids=["none", "twice", "two"])
def test_a_request_names_one_host(server: Server, fields: bytes) -> None:
    assert status(server.ask(b"GET / HTTP/1.1\r\n" + fields + b"\r\n")) == 400


def test_http_1_0_needs_no_host_and_gets_no_chunks(server: Server) -> None:
    head, _, body = server.ask(b"GET / HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert status(head) == 200
    assert b"transfer-encoding" not in head.lower()
    assert body == b"0 bytes"
    assert server.ask(get()).endswith(b"\r\n0\r\n\r\n")  # HTTP/1.1 does


def test_what_is_no_http_gets_400(server: Server) -> None:
    reply = server.ask(b"what is this?\r\n\r\n")
    assert (status(reply), b"Invalid HTTP" in reply) == (400, True)


HALVES = {
    "half a line": (b"POST / HT", 408),
    "half a head": (b"POST / HTTP/1.1\r\n" + HOST, 408),
    "no body": (post(b"", length=100), 408),
    "half a body": (post(b"x" * 50, length=100), 408),
    "half a chunk": (b"POST / HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n5\r\n{}" % HOST, 408),
    "empty lines": (b"\r\n", None),
    "nothing": (b"", None),
}


@pytest.mark.parametrize(("sent", "expected"), HALVES.values(), ids=HALVES)
def test_half_a_request_is_closed_in_time(impatient: Server, sent: bytes, expected: int | None) -> None:
    reply = impatient.ask(sent)
    assert (status(reply) if reply else None) == expected
    with closing(impatient.connect(REQUEST)) as client:  # as well after a whole request
        read_answer(client)
        if expected is not None:
            client.sendall(sent)
            assert status(read(client)) == expected


@pytest.mark.parametrize("begin", [b"POST / HTTP/1.1\r\nX: ", post(b"", length=10**6)], ids=["head", "body"])
def test_a_trickle_is_closed_in_time(impatient: Server, begin: bytes) -> None:
    """A byte now and then buys no time, or a thousandth of a second."""
    with closing(impatient.connect(begin)) as client:
        client.settimeout(0.02)
        reply = b""
        while not reply:
            client.sendall(b"x")
            try:
                reply = client.recv(1000)
            except TimeoutError:
                continue
        assert status(reply) == 408


def test_half_a_request_that_was_answered_gets_no_other_answer(impatient: Server) -> None:
    reply = impatient.ask(post(b"x" * 50, path=b"/early", length=100))
    assert status(reply) == 200
    assert reply.endswith(b"\r\n0\r\n\r\n")


ANSWERED = {
    "a late body": (post(b"", path=b"/early", length=10), b"x" * 10),
    "an empty line": (REQUEST, b"\r\n"),
    "half an empty line": (REQUEST, b"\r"),
    "a late body and an empty line": (post(b"", path=b"/early", length=10), b"x" * 10 + b"\r\n"),
}


@pytest.mark.parametrize(("sent", "rest"), ANSWERED.values(), ids=ANSWERED)
def test_a_connection_is_kept_once_the_rest_of_an_answered_request_has_come(
    impatient: Server, sent: bytes, rest: bytes
) -> None:
    """As long as others, and it gets no answer that nothing has asked for."""
    with closing(impatient.connect(sent)) as client:
        read_answer(client)
        client.sendall(rest)
        time.sleep(3 * Impatient.head_timeout_s)
        client.sendall(REQUEST)
        assert status(read_answer(client)) == 200
        client.sendall(b"\r\n")
        assert read(client) == b""  # closed in time


def test_half_a_head_behind_an_answered_body_is_closed_in_time(impatient: Server) -> None:
    with closing(impatient.connect(post(b"", path=b"/early", length=10))) as client:
        read_answer(client)
        client.sendall(b"x" * 10 + b"\r\nPOST / HT")
        assert status(read(client)) == 408


def test_empty_lines_buy_no_time(impatient: Server) -> None:
    with closing(impatient.connect()) as client:
        client.settimeout(0.05)
        reply = None
        while reply is None:
            client.sendall(b"\r\n")
            with suppress(TimeoutError):
                reply = client.recv(1000)
        assert reply == b""


@pytest.mark.parametrize(("text", "expected"), [("2.5", 2.5), ("ten", 10), ("", 10), ("-1", 10), ("nan", 10)])
def test_a_wrong_time_for_heads_gives_way_to_the_usual(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, expected: float
) -> None:
    monkeypatch.setenv("CONSORT_HEAD_TIMEOUT_S", text)
    assert connection._configured_head_timeout_s() == expected
    assert ("CONSORT_HEAD_TIMEOUT_S" in caplog.text) == (text != "2.5")


def test_an_answer_takes_as_long_as_it_takes(impatient: Server) -> None:
    """Its connection is idle for longer than a head may take."""
    application = impatient.application
    application.may_answer.clear()
    held = application.held
    with closing(impatient.connect(get(path=b"/held"))) as client:
        wait_until(lambda: application.held == held + 1, "the request is there")
        time.sleep(3 * Impatient.head_timeout_s)
        application.may_answer.set()
        assert status(read(client)) == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(server: Server, version: bytes) -> None:
    application, held = server.application, server.application.held
    application.may_answer.clear()
    with closing(server.connect(get(path=b"/held", version=version).replace(b"Connection: close\r\n", b""))) as client:
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: application.held == held + 1, "the request is there")
        time.sleep(0.6)  # it is looked for meanwhile
        application.may_answer.set()
        reply = read(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert (status(reply), b"bytes" in reply) == (200, True)


@pytest.mark.parametrize("rude", [False, True], ids=["closes", "resets"])
def test_a_client_that_leaves_is_noticed(server: Server, rude: bool) -> None:
    application, held, aborted = server.application, server.application.held, server.application.aborted
    application.may_answer.clear()
    client = server.connect(get(path=b"/held"))
    wait_until(lambda: application.held == held + 1, "the request is there")
    if rude:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait_until(lambda: application.aborted == aborted + 1, "the application hears of it")


def test_half_a_request_does_not_keep_a_server_from_ending() -> None:
    server = next(running := run(BoundedConnection))
    halves = [server.connect(sent) for sent, _ in HALVES.values() for _ in range(3)]
    wait_until(lambda: len(server.uvicorn.server_state.connections) == len(halves), "all are connected")
    server.uvicorn.should_exit = True
    server.thread.join(connection.HEAD_TIMEOUT_S / 2)
    is_running = server.thread.is_alive()
    for half in halves:
        half.close()
    next(running, None)
    assert not is_running
