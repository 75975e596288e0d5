"""Middleware of Serve's proxy process: asks another coordinator to go on when one has died.

Serve imports `middlewares` by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH. Must not import slow modules.
"""

import asyncio
import re
import time
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.loops.thread import return_idle_memory
from decoding.errors import UnavailableError
from deployments.apis.errors import api_of, error_event, error_response
from deployments.http import connection
from deployments.http.connection import seconds_unread
from deployments.http.doorkeeper import Doorkeeper
from deployments.http.head import GENERATING, REQUEST_ID, REQUEST_START, WORKING, arrival_header, with_header

CALLBACK = f"{__name__}:middlewares"

_LOST = UnavailableError("the coordinator that answered has died; ask again")
_MOST_BODY_BYTES = 2**20  # larger bodies are not kept, so they can't be sent again
_PATIENCE_S = 60.0  # for another coordinator to take the request
_PAUSE_S = 0.2
_TRY_AGAIN = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE}
_EVENT_ID = re.compile(rb"^id: ([\x21-\x7e]{1,4096})\n", re.MULTILINE)
_LAST_EVENT_ID, _NO_EVENT = "last-event-id", "0"  # as in deployments/apis/resumable.py


def middlewares() -> list[Middleware]:
    """Middlewares for Serve's proxy, called by Serve before its server starts."""
    connection.install()
    return_idle_memory()
    return [Middleware(CoordinatorLossMiddleware), Middleware(Doorkeeper)]  # the last one runs first


class CoordinatorLossMiddleware:
    """ASGI middleware that repeats a request whose coordinator has died, from the last event that it has passed on.

    It asks for events with ids, and takes them out again unless the client asked for them, too.
    A stream whose events have no ids ends with an error event. What can't be repeated and had no response gets a 503.
    """

    def __init__(self, app: ASGIApp, *, patience_s: float = _PATIENCE_S, pause_s: float = _PAUSE_S) -> None:
        self._app, self._patience_s, self._pause_s = app, patience_s, pause_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = with_header(scope, REQUEST_START, arrival_header(time.time() - seconds_unread(receive)))
        wants_ids = _LAST_EVENT_ID in Headers(scope=scope)
        body, response = _Body(receive), _Response(send, tells_ids=wants_ids)
        if scope["path"].endswith(GENERATING) and not wants_ids:
            scope = with_header(scope, _LAST_EVENT_ID, _NO_EVENT)
        await self._app(scope, body.receive, response.send)
        if response.is_whole:
            return
        changes_nothing = scope["method"] in ("GET", "HEAD") or scope["path"].endswith(WORKING)
        if changes_nothing and body.is_kept and response.can_go_on:
            await self._repeat(scope, body, response)
        if not response.is_whole:
            await self._give_up(scope, receive, send, response)

    async def _repeat(self, scope: Scope, body: "_Body", response: "_Response") -> None:
        """Ask again until the answer is complete, or no coordinator has taken the request for too long."""
        taken_s = time.monotonic()
        while not (response.is_whole or body.has_disconnected) and time.monotonic() - taken_s < self._patience_s:
            await asyncio.sleep(self._pause_s)
            passed_on, last_id = response.bytes, response.last_id
            again = scope if last_id is None else with_header(scope, _LAST_EVENT_ID, last_id)
            again = {key: value for key, value in again.items() if key != "state"}
            await self._app(again, body.repeated(), response.continued())
            if response.bytes > passed_on:
                taken_s = time.monotonic()  # this coordinator answered, and died

    async def _give_up(self, scope: Scope, receive: Receive, send: Send, response: "_Response") -> None:
        if not response.has_begun:
            refusal = error_response(_LOST)
            refusal.headers[REQUEST_ID] = Headers(scope=scope).get(REQUEST_ID, "")  # Serve has set it
            await refusal(scope, receive, send)
        elif response.is_stream:
            await send({"type": "http.response.body", "body": error_event(_LOST, api_of(scope["path"])).encode()})


class _Body:
    """A request's body, kept so that it can be sent again."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._messages, self._bytes = receive, list[Message](), 0
        self._is_complete = self.has_disconnected = False

    @property
    def is_kept(self) -> bool:
        return self._is_complete and self._bytes <= _MOST_BODY_BYTES and not self.has_disconnected

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.has_disconnected = True
        elif not self._is_complete:
            self._bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._bytes <= _MOST_BODY_BYTES:
                self._messages.append(message)
            else:
                self._messages.clear()
        return message

    def repeated(self) -> Receive:
        """Return a function that receives the same body again, and then whatever the client sends."""
        messages = iter(self._messages)

        async def receive() -> Message:
            message = next(messages, None)
            return await self.receive() if message is None else message

        return receive


class _Response:
    """The part of a response that the client has received."""

    def __init__(self, send: Send, *, tells_ids: bool) -> None:
        self._send, self._tells_ids = send, tells_ids
        self._tail = b""  # of a stream: the beginning of an event
        self.has_begun = self.is_stream = self.is_whole = False
        self.last_id: str | None = None  # of a stream's events
        self.bytes = 0

    @property
    def can_go_on(self) -> bool:
        return not self.has_begun or (self.is_stream and (self.last_id is not None or not self.bytes))

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.is_stream = _is_stream(message)
            await self._send(message)
        else:
            await self._pass_on(message)

    def continued(self) -> Send:
        """Return a function that passes on what another response adds, unless that is a refusal."""
        is_refusal = False
        had_begun, self._tail = self.has_begun, b""

        async def send(message: Message) -> None:
            nonlocal is_refusal
            if message["type"] == "http.response.start":
                differs = had_begun and (message["status"] != HTTPStatus.OK or not _is_stream(message))
                is_refusal = message["status"] in _TRY_AGAIN or differs
                if not is_refusal and not had_begun:
                    await self.send(message)
            elif not is_refusal:
                await self._pass_on(message)

        return send

    async def _pass_on(self, message: Message) -> None:
        """Pass on a part of the body; of a stream only complete events, so that another response can follow."""
        more = message.get("more_body", False)
        body = message.get("body", b"")
        if self.is_stream and more:
            whole, separator, self._tail = (self._tail + body).rpartition(b"\n\n")
            body = whole + separator
            ids = _EVENT_ID.findall(body)
            self.last_id = ids[-1].decode() if ids else self.last_id
        else:
            body, self._tail = self._tail + body, b""
        if self.is_stream and not self._tells_ids:
            body = _EVENT_ID.sub(b"", body)
        self.is_whole = not more
        self.bytes += len(body)
        if body or not more:
            await self._send({**message, "body": body})


def _is_stream(message: Message) -> bool:
    return Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
