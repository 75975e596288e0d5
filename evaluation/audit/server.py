"""A server under audit: requests for one model, whole, streamed or abandoned, and the errors that refuse them."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from decoding.errors import ConsortError, InvalidRequestError, OverloadedError, UnavailableError
from deployments.fields.loopback import is_loopback
from evaluation.audit.answer import Answer, collect

Body = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_SILENCE_S = 600.0  # a crowd may have to wait
_ABANDON = 2  # events after which a client hangs up


@dataclass(frozen=True, slots=True)
class Engine:
    """What only one engine's requests can say."""

    plain: Body | None = None  # without drafts
    token_ids: Body | None = None  # report the answer's token ids


_ENGINES = {  # by `owned_by` in the list of models
    "consort": Engine(plain={"speculate": False}, token_ids={"return_token_details": True}),
    "vllm": Engine(token_ids={"return_token_ids": True}),
}


@dataclass(slots=True)
class Server:
    """A model on a server. Methods raise InvalidRequestError for what it refuses, UnavailableError for what breaks."""

    url: str
    http: httpx.Client
    model: str
    name: str  # of the engine, and its version if it tells
    engine: Engine
    other: "Server | None" = None  # that should give the same answers
    routes: frozenset[str] = frozenset()
    tokens: int = 0  # of answers up to now
    _references: dict[str, Answer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, body: Body, **fields: object) -> Answer:
        """Return the whole answer to a body with further fields."""
        response = self.send(body | fields)
        return self._counted(collect([_document(response)]))

    def reference(self, body: Body) -> Answer:
        """Return what the server answers when it has nothing else to do, from memory if it was asked before."""
        key = json.dumps(body)
        if key not in self._references:
            self._references[key] = self.ask(body)
        return self._references[key]

    def forget(self) -> None:
        """Ask anew for all references."""
        self._references.clear()

    def stream(self, body: Body, **fields: object) -> Answer:
        """Return a streamed answer, put together."""
        events = list(self._events(body | fields))
        ended = bool(events) and events[-1] == "[DONE]"
        return self._counted(collect([json.loads(event) for event in events if event != "[DONE]"], ended=ended))

    def together(
        self, bodies: Sequence[Body], neighbours: Sequence[Body] = (), *, abandoned: bool = False
    ) -> list[Answer]:
        """Return the answers to bodies sent at once beside neighbours, of which `abandoned` ones hang up soon."""
        with ThreadPoolExecutor(len(bodies) + len(neighbours)) as clients:
            others = [clients.submit(self._abandon if abandoned else self.ask, body) for body in neighbours]
            answers: list[Future[Answer]] = [clients.submit(self.ask, body) for body in bodies]
            for other in others:
                with suppress(ConsortError):
                    other.result()
            return [answer.result() for answer in answers]

    def send(self, body: Body | str) -> httpx.Response:
        """Send a body, also one that is no JSON."""
        return self._post(route(body), body if isinstance(body, str) else json.dumps(self.full(body)))

    def full(self, body: Body) -> Body:
        return {"model": self.model, **body}

    def prompt_ids(self, prompt: str) -> list[int] | None:
        """Return the tokens of a prompt; None where no route tells them."""
        response = self._post("/tokenize", json.dumps(self.full({"prompt": prompt})))
        tokens = response.json().get("tokens") if response.is_success else None
        return tokens if tokens and all(isinstance(token, int) for token in tokens) else None

    def _post(self, path: str, content: str) -> httpx.Response:
        try:
            return self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection broke off ({error!r})") from error

    def _counted(self, answer: Answer) -> Answer:
        with self._lock:
            self.tokens += answer.usage.get("completion_tokens", 0)
        return answer

    def _abandon(self, body: Body) -> None:
        for index, _ in enumerate(self._events(body)):
            if index == _ABANDON:
                break

    def _events(self, body: Body) -> Iterator[str]:
        asked = self.full(body) | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self.http.stream("POST", route(body), json=asked) as response:
                if not response.is_success:
                    response.read()
                    _document(response)
                rest = b""
                for chunk in response.iter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from (line[5:].decode().strip() for line in lines if line.startswith(b"data:"))
        except httpx.HTTPError as error:
            raise UnavailableError(f"the stream broke off ({error!r})") from error


def route(body: Body | str) -> str:
    """Return where a body is sent: conversations to chat."""
    return CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS


def connect(url: str, model: str | None = None, api_key: str | None = None, *, other: Server | None = None) -> Server:
    """Return a server by its URL, with or without http:// and /v1. model: None: the first that it lists.

    Raises UnavailableError, InvalidRequestError if it does not answer a short request.
    """
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key.strip()}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    trusts_proxies = not is_loopback(urlsplit(url).hostname or "")
    http = httpx.Client(base_url=url, headers=headers, timeout=_SILENCE_S, limits=limits, trust_env=trusts_proxies)
    try:
        cards: list[dict[str, Any]] = _document(http.get("/v1/models"))["data"]
        version = http.get("/version")
    except httpx.HTTPError as error:
        raise UnavailableError(f"no server answers at {url} ({error})") from error
    names = [card["id"] for card in cards]
    if model is None and not names:
        raise UnavailableError(f"{url} serves no models")
    owner = str(cards[0].get("owned_by", "unknown")) if cards else "unknown"
    number = version.json().get("version", "") if "json" in version.headers.get("Content-Type", "") else ""
    engine = _ENGINES.get(owner, Engine())
    server = Server(url, http, model or names[0], f"{owner} {number}".strip(), engine, other)
    server.routes = frozenset(_offered(server))
    return server


def _offered(server: Server) -> Iterator[str]:
    """Yield the routes that answer; raises what the last one raises if none does."""
    refusal: ConsortError | None = None
    for asked in ({"prompt": "A"}, {"messages": [{"role": "user", "content": "A"}]}):
        try:
            server.ask(asked, max_tokens=1)
            yield route(asked)
        except InvalidRequestError as error:
            if refusal is not None:
                raise
            refusal = error


def _document(response: httpx.Response) -> Any:
    """Return a response's JSON; raises as the methods of `Server` do."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if response.is_success and isinstance(document, dict):
        return document
    message = f"HTTP {response.status_code}: {response.text[:300]}"
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        raise OverloadedError(message)
    if response.status_code in (httpx.codes.NOT_IMPLEMENTED, *range(400, 500)):
        raise InvalidRequestError(message)
    raise UnavailableError(message)
