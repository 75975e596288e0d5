"""What a request's head says: whether it is work and for which endpoint, its key, its id, its length, when it came."""

import re
import secrets
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import InvalidRequestError

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
WORKING = (*GENERATING, "/tokenize", "/detokenize", "/compress", "/v1/messages/count_tokens")
REQUEST_ID = "X-Request-Id"
WEIGHTS = "X-Consort-Weights"  # the version that wrote an answer
REQUEST_START = "x-request-start"  # when the request came to the proxy, as load balancers name it
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LONGEST_S = 60.0  # on the way; more is another machine's wrong clock


def is_work(scope: Scope) -> bool:
    """Whether a request makes text or tokens. A base URL's name may precede the path."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and scope["method"] == "POST" and path.endswith(WORKING)


def is_generating(scope: Scope) -> bool:
    """Whether a request makes text."""
    return is_work(scope) and scope["path"].endswith(GENERATING)


class BaseUrls:
    """ASGI middleware that routes /NAME/v1/… as /v1/…, with the endpoint, or None, in the request's state.

    NAME is that of an endpoint, or else a kind, for the first endpoint of that kind. The state also has the server's
    `only_endpoint`, or None. kinds: by endpoint.
    """

    def __init__(self, app: ASGIApp, *, kinds: Mapping[str, str]) -> None:
        firsts = {kind: name for name, kind in reversed(list(kinds.items()))}
        self._app, self._names = app, firsts | {name: name for name in kinds}
        self._only = next(iter(kinds)) if len(kinds) == 1 else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            start = max(0, path.find("/v1/", 2))
            name = self._names.get(path[1:start])
            scope.setdefault("state", {}).update(endpoint=name, only_endpoint=self._only)
            if name is not None:
                scope = {**scope, "path": path[start:], "raw_path": path[start:].encode()}
        await self._app(scope, receive, send)


def resolve_model(model: str, request: Request) -> str:
    """Endpoint named by `model` or by the base URL, or else the only one.

    Raises InvalidRequestError if there are several and none is named, or `model` and the URL differ.
    """
    own: str | None = getattr(request.state, "endpoint", None)
    if model and own is not None and model != own:
        raise InvalidRequestError(f"model: is {model!r}, but this base URL is of {own!r}; leave it out", field="model")
    name = model or own or getattr(request.state, "only_endpoint", None)
    if not name:
        raise InvalidRequestError("model: is required; GET /v1/models lists the endpoints", field="model")
    return name


def on_start(send: Send, edit: Callable[[Message], None]) -> Send:
    """Wrap send to edit the message that starts the response, with its status and its headers."""

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            edit(message)
        await send(message)

    return send_on


def with_header(scope: Scope, name: str, value: str) -> Scope:
    """Return the request with that header in place of those of its name."""
    encoded = name.encode()
    others = [header for header in scope["headers"] if header[0] != encoded]
    return {**scope, "headers": [*others, (encoded, value.encode())]}


def authorization_of(headers: Headers) -> str | None:
    """The Authorization header, or the API key as Anthropic's clients send it."""
    key = headers.get("X-Api-Key")
    return headers.get("Authorization") or (None if key is None else f"Bearer {key}")


def request_id_of(headers: Headers) -> str:
    """The client's request id if it is safe to repeat, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _GOOD_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def content_length(headers: Headers) -> int | None:
    """How many bytes the body has, by its header; None: unknown."""
    length = headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None


def arrival_header(now_s: float) -> str:
    """Return the header's value. now_s: by the wall clock, which machines share."""
    return f"t={now_s:.6f}"


def seconds_since_arrival(headers: Mapping[str, str], now_s: float) -> float:
    """Return for how long a request has been on the way; 0 without the header, or with one that can't be right."""
    try:
        passed_s = now_s - float(headers.get(REQUEST_START, "").removeprefix("t="))
    except ValueError:
        return 0.0
    return passed_s if 0 <= passed_s <= _LONGEST_S else 0.0
