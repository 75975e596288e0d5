"""What every request passes: hosts, origins, API keys, the size of bodies; how it ended; whether the server stops."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import UnavailableError
from deployments.apis.errors import error_response, refusal_response
from deployments.configuration.api_keys import KeyRing
from deployments.http.head import (
    REQUEST_ID,
    WEIGHTS,
    authorization_of,
    content_length,
    is_work,
    on_start,
    request_id_of,
    seconds_since_arrival,
)
from deployments.http.page import is_page
from deployments.monitoring.metrics import Outcome

_OPEN_PATHS = {"/health", "/ready"}  # answered without a key
# A page from this machine. Any other page could use the server behind the user's back, unless it is configured.
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
Record = Callable[[str, str, Outcome], None]  # endpoint, name of the API key, outcome
_REASONS = {HTTPStatus.UNAUTHORIZED: "unauthorized", HTTPStatus.SERVICE_UNAVAILABLE: "unavailable"}
_logger = logging.getLogger("consort.access")


class HostCheck:
    """ASGI middleware that refuses requests whose Host header names another server, against DNS rebinding.

    A web page can let its own name resolve to 127.0.0.1. Then it has the same origin as what listens there, and CORS
    does not keep it out. But its requests still name its own host. allowed: names without ports; [IPv6 addresses].
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("Host", "").lower()
            name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
            if name not in self._allowed:
                reason = f"The Host header names {name!r}, which is not this server; add it to http.allowed_hosts."
                await refusal_response(421, reason, "wrong_host")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def cors_options(origins: Sequence[str] | None) -> dict[str, Any]:
    """Options of Starlette's CORSMiddleware. origins: those of the configuration; None: pages from this machine."""
    allowed = {"allow_origin_regex": _LOCAL_PAGES} if origins is None else {"allow_origins": origins}
    return {
        **allowed,
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": [REQUEST_ID, "X-Consort-Ignored-Fields", WEIGHTS, "Retry-After"],
        "allow_private_network": bool(origins),
    }


class Gate:
    """ASGI middleware that checks key and size, and sets `key` and `request_id` in the request's state."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, max_body_bytes: int, add_request_id: bool = True) -> None:
        """add_request_id: whether to add the request's id to responses; Serve's proxy does so by itself."""
        self._app, self._keys, self._max_body_bytes, self._adds_id = app, keys, max_body_bytes, add_request_id
        self._too_large = f"The body is larger than {max_body_bytes} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        if self._adds_id:
            send = on_start(send, lambda message: MutableHeaders(scope=message).update({REQUEST_ID: request_id}))
        key = self._keys.find(authorization_of(headers))
        scope.setdefault("state", {}).update(key=key, request_id=request_id)
        if key is None and scope["path"] not in _OPEN_PATHS and not is_page(scope["path"]):
            reason = "A valid API key is needed: Authorization: Bearer KEY."
            response = refusal_response(401, reason, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
        elif (content_length(headers) or 0) > self._max_body_bytes:
            await refusal_response(413, self._too_large, "body_too_large")(scope, receive, send)
        else:
            await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap receive to raise HTTPException when the body exceeds its bound, whatever its Content-Length."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return bounded


class Drain:
    """Counts the requests in progress, and waits for their end. For use in one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_served = False  # whether any request came
        self._in_progress, self._idle = 0, asyncio.Event()

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.has_served = True
        self._in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()

    async def run(self, drain_s: float) -> int:
        """Refuse new requests from now on, and wait for the others. Returns how many are left after `drain_s`."""
        self.has_begun = True
        if self._in_progress:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        return self._in_progress


class DrainMiddleware:
    """ASGI middleware that counts requests for text or tokens, and answers 503 once the server stops.

    A request is in progress from when its body has come whole: the server waits for no client that sends half of one.
    """

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        if self._drain.has_begun:
            scope["state"]["error"] = error = _stopping()
            await error_response(error)(scope, receive, send)
            return
        with ExitStack() as stack:
            has_come = False

            async def receive_whole() -> Message:
                nonlocal has_come
                message = await receive()
                if message["type"] == "http.request" and not (message.get("more_body") or has_come):
                    if self._drain.has_begun:
                        raise _stopping()  # the application answers it as any other
                    stack.enter_context(self._drain.hold())
                    has_come = True
                return message

            await self._app(scope, receive_whole, send)


def _stopping() -> UnavailableError:
    return UnavailableError("this server is stopping; ask again", retry_after_s=1)


def log_requests() -> None:
    """Log requests to standard error from now on, one JSON line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def log_refused(key: str, reason: str, requests: int) -> None:
    """Log requests that the proxy has refused, on one line."""
    if _logger.isEnabledFor(logging.INFO):
        status = int(HTTPStatus.TOO_MANY_REQUESTS)
        line = {"time": round(time.time(), 3), "status": status, "key": key, "outcome": reason, "requests": requests}
        _logger.info(json.dumps(line))


class OutcomeMiddleware:
    """ASGI middleware that records each request for text or tokens once it has ended.

    Others put into the request's state what is known of it: `key`, `request_id`, `endpoint` and `error`.
    """

    def __init__(self, app: ASGIApp, *, record: Record, endpoints: Collection[str]) -> None:
        self._app, self._record = app, record
        self._endpoint = next(iter(endpoints)) if len(endpoints) == 1 else ""  # of requests that name none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = time.monotonic() - seconds_since_arrival(Headers(scope=scope), time.time())
        status, has_ended = 0, False
        state: dict[str, Any] = scope.setdefault("state", {})
        state["arrived_s"] = arrived_s

        async def send_on(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_on)
        except ClientDisconnect:
            pass  # while sending its body: there is nobody to answer
        except Exception as error:  # an outer layer answers
            state["error"], status, has_ended = error, HTTPStatus.INTERNAL_SERVER_ERROR, True
            raise
        finally:
            outcome = _outcome(status, state.get("error"), has_ended=has_ended)
            self._end(scope, status, outcome, time.monotonic() - arrived_s)

    def _end(self, scope: Scope, status: int, outcome: Outcome, seconds: float) -> None:
        state = scope["state"]
        key = state.get("key")
        if is_work(scope):
            self._record(state.get("endpoint") or self._endpoint, "" if key is None else key.name, outcome)
        if not _logger.isEnabledFor(logging.INFO):
            return
        line = {
            "request_id": state.get("request_id"),
            "time": round(time.time(), 3),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "key": None if key is None else key.name,
            "outcome": outcome.reason or "answered",
        }
        _logger.info(json.dumps(line))


def _outcome(status: int, error: Exception | None, *, has_ended: bool) -> Outcome:
    if error is not None:
        return Outcome.from_error(error)
    if not has_ended:
        return Outcome("aborted")  # its client hung up
    if status < HTTPStatus.BAD_REQUEST:
        return Outcome()
    default = "invalid_request" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "internal_error"
    return Outcome(_REASONS.get(HTTPStatus(status), default))
