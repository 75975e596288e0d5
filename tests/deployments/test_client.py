"""The HTTP client against a scripted server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from decoding.errors import UnavailableError
from deployments.client import Client

STREAMS = {
    "/good": (200, 'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'),
    "/broken": (200, 'data: {"a": 1}\n\n'),
    "/failed": (200, 'data: {"a": 1}\n\ndata: {"error": {"message": "gone"}}\n\n'),
    "/refused": (429, '{"error": {"message": "too many"}}'),
    "/odd": (502, "<html>"),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        status, body = STREAMS[self.path]
        self.send_response(status)
        self.end_headers()
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


@pytest.mark.parametrize(
    ("path", "message"),
    [("/broken", "broke off"), ("/failed", "gone"), ("/refused", "too many"), ("/odd", "HTTP 502")],
)
def test_anything_else_is_an_error(client: Client, path: str, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        list(client.stream(path, {}))


def test_get_has_a_status_and_a_document(client: Client) -> None:
    reply = client.get("/refused")
    assert (reply.status, reply.document["error"]["message"]) == (429, "too many")
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
