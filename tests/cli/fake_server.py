"""A stand-in for a server: the routes that the console uses, with scripted answers, from the standard library."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Token = tuple[str, str]  # text, source

TOKENS: Sequence[Token] = (("Once", "plain"), (" upon", "accepted"), (" a", "accepted"), (" time", "recovered"))
TEMPLATES = [{"id": "translate", "template": "{{ text }} in {{ language }}", "variables": ["language", "text"]}]
CARDS: list[dict[str, Any]] = [
    {
        "id": "consort",
        "target": "large",
        "drafter": "small",
        "proposers": ["drafter", "ngram"],
        "draft_length": 4,
        "context_length": 99,
        "ready": True,
    },
    {"id": "solo", "target": "large", "drafter": None, "draft_length": 0, "context_length": 99, "ready": False},
]
TOTALS = {"requests": 3, "tokens": 100, "steps": 40, "drafted": 80, "accepted": 60, "missed": 10, "hits": 4}
SHORTAGE = "1 can't be placed: each needs 1 GPU, and the cluster has 0 GPU free"
STATUS: dict[str, Any] = {
    "status": "ready",
    "version": "9.9",
    "uptime_s": 50.0,
    "requests": {"running": 2, "waiting": 1, "max": 256},
    "endpoints": [
        {"name": "consort", "target": "large", "drafter": "small", "ready": True, "totals": TOTALS}
        | {"predicted_wait_s": 3.2, "proposers": [{"name": "drafter", "acceptance_rate": 0.75, "time_share": 0.125}]}
    ],
    "models": [
        {"model": "large", "wanted": 2, "running": 1, "reason": SHORTAGE}
        | {"last_restart": {"at_s": 1.8e9, "reason": "its node died"}},
        {"model": "small", "wanted": 1, "running": 1, "reason": None, "last_restart": None},
    ],
    "replicas": [
        {
            "name": "large#1",
            "model": "large",
            "role": "target",
            "running": 2,
            "waiting": 1,
            "slots": 4,
            "drafting": True,
            "weights": None,
        },
        {
            "name": "small#1",
            "model": "small",
            "role": "drafter",
            "running": 2,
            "waiting": 0,
            "slots": 4,
            "drafting": None,
            "weights": None,
        },
    ],
}
SPECULATION = {
    "steps": 2,
    "drafted": 4,
    "accepted": 2,
    "acceptance_rate": 0.5,
    "acceptance_length": 2.0,
    "hit_rate": 0.25,
}


class FakeServer(ThreadingHTTPServer):
    """Answers every request with the same tokens, and remembers the bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens: Sequence[Token] = TOKENS
        self.token_s = 0.0  # between two tokens
        self.knows_details = True
        self.status: dict[str, Any] = STATUS
        self.is_up = True
        self.api_key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()  # a client left in mid-stream

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        documents: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"data": CARDS}),
            "/v1/templates": (200, {"data": TEMPLATES}),
            "/v1/status": (200, self.server.status) if self.server.is_up else (503, _error("no models yet", None)),
        }
        if self._authorized():
            self._send(*documents.get(self.path, (404, _error("no such route", None))))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._authorized():
            return
        if "return_token_details" in body and not self.server.knows_details:
            self._send(400, _error("return_token_details: is not known", "return_token_details"))
            return
        self.server.bodies.append(body)
        if self.path == "/scale":
            self._send(200, body)
            return
        if body.get("temperature") == 9:
            self._send(400, _error("temperature is too high.", "temperature"))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in self._events(body):
                self.wfile.write(f"data: {event}\n\n".encode())
        except OSError:
            self.server.hung_up.set()

    def _events(self, body: dict[str, Any]) -> Iterator[str]:
        for index, (text, source) in enumerate(self.server.tokens):
            time.sleep(self.server.token_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
            if body.get("return_token_details"):
                choice["token_details"] = [{"id": index, "text": text, "source": source}]
            yield json.dumps({"choices": [choice]})
        usage = {"prompt_tokens": 5, "completion_tokens": len(self.server.tokens), "total_tokens": 9}
        seed = body.get("seed", 77)
        end = {"index": 0, "finish_reason": "stop", "text": "", "delta": {"content": ""}}
        yield json.dumps({"choices": [end], "speculation": SPECULATION, "seed": seed})
        yield json.dumps({"choices": [], "usage": usage, "speculation": SPECULATION, "seed": seed})
        yield "[DONE]"

    def _authorized(self) -> bool:
        wanted = self.server.api_key
        if wanted is None or self.headers["Authorization"] == f"Bearer {wanted}":
            return True
        self._send(401, _error("the API key is missing or wrong", None))
        return False

    def _send(self, status: int, document: Any) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

    def log_message(self, *args: object) -> None:
        """Nothing on the terminal."""


def _error(message: str, field: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": None}}
