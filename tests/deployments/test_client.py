"""The HTTP client against a scripted server."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from deployments import client as client_module
from deployments.client import Client

STREAMS = {
    "/lines": (200, 'data: {"a": "x\u2028y"}\n\ndata: [DONE]\n\n'),
    "/good": (200, 'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'),
    "/broken": (200, 'data: {"a": 1}\n\n'),
    "/failed": (200, 'data: {"a": 1}\n\ndata: {"error": {"message": "gone"}}\n\n'),
    "/refused": (429, '{"error": {"message": "too many"}}'),
    "/large": (413, '{"error": {"message": "too large"}}'),
    "/late": (408, '{"error": {"message": "too late"}}'),
    "/late-stream": (200, 'data: {"error": {"message": "too late", "type": "timeout_error"}}\n\n'),
    "/slow": (200, 'data: {"a": 1}\n\ndata: [DONE]\n\n'),
    "/slow-document": (200, "{}"),
    "/odd": (502, "<html>"),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        status, body = STREAMS[self.path]
        if self.path.startswith("/slow"):
            time.sleep(0.5)
        self.send_response(status)
        self.send_header("Retry-After", "7")
        self.end_headers()
        with suppress(ConnectionError):  # the client may have given up
            self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def client() -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Client(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
        thread.join()


def test_a_stream_ends_with_done(client: Client) -> None:
    assert list(client.stream("/good", {})) == [{"a": 1}, {"a": 2}]


def test_only_line_feeds_end_lines(client: Client) -> None:
    assert list(client.stream("/lines", {})) == [{"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/broken", UnavailableError, "broke off"),
        ("/failed", UnavailableError, "gone"),
        ("/refused", OverloadedError, "too many"),
        ("/large", InvalidRequestError, "too large"),
        ("/late", DeadlineError, "too late"),
        ("/late-stream", DeadlineError, "too late"),
        ("/odd", UnavailableError, "HTTP 502"),
    ],
)
def test_anything_else_is_an_error(client: Client, path: str, error: type[ConsortError], message: str) -> None:
    with pytest.raises(error, match=message):
        list(client.stream(path, {}))


class Restarting:
    """A server of the path /v1/completions whose connections break off, as with a proxy that is killed and replaced."""

    def __init__(self, *scripts: bytes | int) -> None:
        """scripts: of each connection: what it sends before it breaks off, or the status that refuses it."""
        self.scripts = list(scripts)
        self.asked_after: list[str | None] = []  # which event, by connection

    def __enter__(self) -> Client:
        restarting = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                restarting.asked_after.append(self.headers["Last-Event-ID"])
                script = restarting.scripts.pop(0)
                if isinstance(script, int):
                    self.send_error(script)
                elif script:
                    self.send_response(200)
                    self.send_header("Content-Length", "9999")  # so that the end of the connection is no end of a body
                    self.end_headers()
                    self.wfile.write(script)

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return Client(f"http://127.0.0.1:{self._server.server_port}/")

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


PATH = "/v1/completions"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PAUSE_S", 0.01)


@pytest.mark.usefixtures("impatient")
def test_a_stream_is_resumed_after_the_last_event_that_came_whole() -> None:
    restarting = Restarting(
        b'id: a/1\ndata: {"a": 1}\n\nid: a/2\ndata: {"a": 2}\n\nid: a/3\nda',
        503,
        b"",
        b'id: a/3\ndata: {"a": 3}\n\ndata: [DONE]\n\n',
    )
    with restarting as client:
        assert list(client.stream(PATH, {})) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert restarting.asked_after == ["0", "a/2", "a/2", "a/2"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("scripts", "error", "connections"),
    [
        ([b'data: {"a": 1}\n\n'], UnavailableError, 1),  # without ids
        ([b'id: a/1\ndata: {"a": 1}\n\n', 400], InvalidRequestError, 2),
        ([b'id: a/1\ndata: {"a": 1}\n\ndata: {"error": {"message": "gone"}}\n\n'], UnavailableError, 1),
        ([503], UnavailableError, 1),
    ],
    ids=["no ids", "refused", "error event", "not begun"],
)
def test_a_stream_that_can_not_go_on_is_an_error(
    scripts: list[bytes | int], error: type[ConsortError], connections: int
) -> None:
    restarting = Restarting(*scripts)
    with restarting as client, pytest.raises(error):
        list(client.stream(PATH, {}))
    assert len(restarting.asked_after) == connections


@pytest.mark.usefixtures("impatient")
def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PATIENCE_S", 0.05)
    with Restarting(b'id: a/1\ndata: {"a": 1}\n\n') as client:
        stream = client.stream(PATH, {})
        assert next(stream) == {"a": 1}
    with pytest.raises(UnavailableError, match="no Consort server answers"):
        next(stream)


@pytest.mark.usefixtures("impatient")
def test_a_completion_whose_connection_breaks_is_asked_for_again() -> None:
    restarting = Restarting(b"", b"", b'{"a": 1}' + b" " * 9991)
    with restarting as client:
        assert client.post(PATH, {}).document == {"a": 1}
    with Restarting(b"") as client, pytest.raises(UnavailableError):
        client.post("/scale", {})


def test_answers_are_waited_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(client_module, "_GET_TIMEOUT_S", 0.2)
    assert client.post("/slow-document", {}).document == {}
    assert list(client.stream("/slow", {})) == [{"a": 1}]
    with pytest.raises(UnavailableError, match="/slow-document: the server has not answered in time"):
        client.get("/slow-document")


def test_a_machine_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_CONNECT_TIMEOUT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.create_connection(server.getsockname()),  # fills its queue
        pytest.raises(UnavailableError, match=r"no Consort server answers .*timed out"),
    ):
        Client(f"127.0.0.1:{server.getsockname()[1]}").post("/good", {})


def test_get_has_a_status_and_a_document(client: Client) -> None:
    reply = client.get("/refused")
    assert (reply.status, reply.document["error"]["message"]) == (429, "too many")
    with pytest.raises(OverloadedError, match="too many") as refused:
        client.checked("/refused", reply)
    assert refused.value.retry_after_s == 7
    with pytest.raises(UnavailableError, match="no Consort server answers"):
        client.get("/good")


def test_a_proxy_is_for_other_machines(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert Client(client.url).get("/refused").status == 429
    own_address = client.url.replace("127.0.0.1", "127.1")  # which only a resolver knows as this machine's
    assert Client(own_address, local=True).get("/refused").status == 429
    with pytest.raises(UnavailableError, match="refused"):  # by the proxy's port
        Client("http://192.0.2.1").get("/health")


def test_nothing_there() -> None:
    with pytest.raises(UnavailableError, match="no Consort server answers"):
        Client("http://127.0.0.1:1").get("/health")
    with pytest.raises(UnavailableError, match="refused"):
        list(Client("http://127.0.0.1:1").stream("/v1/completions", {}))


@pytest.mark.parametrize("url", ["localhost:1", "http://localhost:1", "http://localhost:1/v1", "localhost:1/v1/"])
def test_urls_as_users_write_them(url: str) -> None:
    assert Client(url).url == "http://localhost:1"
