"""Connections of Serve's proxy: uvicorn's, with bounds on the size of heads and on the time of heads and bodies.

A client that closes its sending side after its request still gets its answer, and HTTP/1.0 gets no chunks.
"""

import asyncio
import logging
import os
import socket
import struct
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import config as uvicorn_config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from deployments.apis.errors import refusal_response

_logger = logging.getLogger("ray.serve")


def _configured_head_timeout_s(default_s: float = 10.0) -> float:
    text = os.environ.get("CONSORT_HEAD_TIMEOUT_S", str(default_s))
    with suppress(ValueError):
        if (timeout_s := float(text)) > 0:
            return timeout_s
    _logger.warning("CONSORT_HEAD_TIMEOUT_S=%s is no number of seconds above 0; heads have %g s.", text, default_s)
    return default_s


HEAD_TIMEOUT_S = _configured_head_timeout_s()
MOST_HEAD_BYTES = 2**16  # of its fields, and of its target
_TOO_LARGE = f"The request's head is larger than {MOST_HEAD_BYTES} bytes."
_BODY_BYTES_PER_S = 2**10  # the slowest body; it gets as long as a head besides
_FRAMING = 8  # most received bytes for each byte of a chunked body, besides `MOST_HEAD_BYTES` for trailers
_LATE_S = 0.5  # a timer that is later shows that the event loop, and so the reading, was held up
_LINGER_S = 2.0  # after a refusal; closing with bytes unread would lose the response
_PROBE_S = 0.25
_LAST_DATA_MS = struct.Struct("52xI")  # tcpi_last_data_recv, in Linux's struct tcp_info, whose beginning never changes
_TCP_CLOSE = 7  # Linux's state of a connection that its client has reset
_CODES = {
    HTTPStatus.BAD_REQUEST: "bad_request",
    HTTPStatus.REQUEST_TIMEOUT: "request_timeout",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "head_too_large",
}


def install() -> None:
    """Use such connections in uvicorn servers that start in this process from now on."""
    uvicorn_config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedConnection.__name__}"


class BoundedConnection(HttpToolsProtocol):
    """A connection of one client, which sends one request after the other."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True  # whether the next byte belongs to a head
        self._head_has_begun = False  # whether a byte of it has come
        self._heads = 0  # complete ones
        # Of the head or body that is coming. The parser reports a field only once it is complete.
        self._unfinished_bytes = self._body_bytes = 0
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun_s = self._due_s = 0.0  # when the timed head or body began, and when its time is up
        self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)  # a first request gets as long as a next one
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        before, idle = (self._heads, self._in_head), self.timeout_keep_alive_task
        super().data_received(data)  # ends that timer
        if self.transport.is_closing() or self._lingers:
            return
        if self._in_head and not self._head_has_begun:
            self._rest(idle.when() if idle and before == (self._heads, True) else None)
            return
        if before == (self._heads, self._in_head):
            self._unfinished_bytes += len(data)
        if self._unfinished_bytes > MOST_HEAD_BYTES + (0 if self._in_head else _FRAMING * self._body_bytes):
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE)
        else:
            self._watch()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio's
        """Keep the connection open for the answer to a request that has come whole."""
        if self._lingers or not (self._in_head and self._is_answering):
            return None
        if self.scheme == "https" or sys.platform != "linux":
            return None  # TLS can't, and elsewhere it is unknown whether the client has gone
        self.cycle.keep_alive = False
        if not (self.cycle.response_started or self.pipeline or self.cycle.scope["http_version"] == "1.0"):
            self.transport.write(STATUS_LINE[100] + b"\r\n")  # a client that has closed both sides resets now
        self._probe()
        return True

    def on_message_begin(self) -> None:
        self._head_has_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._refusal = self._wrong_head()
        if self._refusal is not None:
            raise ValueError(self._refusal[1])  # the parser stops, and uvicorn calls `send_400_response`
        self._unwatch()
        self._heads, self._in_head = self._heads + 1, False
        self._unfinished_bytes = self._body_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unwatch()
        self._in_head, self._head_has_begun, self._unfinished_bytes = True, False, 0
        super().on_message_complete()

    def shutdown(self) -> None:
        """End the connection once its answer has gone; at once if the request has not come whole."""
        if self._is_answering and not (self._in_head or self.pipeline):
            self.transport.close()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, msg)))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # at first

    def _wrong_head(self) -> tuple[HTTPStatus, str] | None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() != "1.0"):  # RFC 9112, section 3.2
            return HTTPStatus.BAD_REQUEST, f"A request needs one Host header; this one has {hosts}."
        return None

    @property
    def _has_upgraded(self) -> bool:
        return self not in self.connections

    def _rest(self, due_s: float | None) -> None:
        """Wait for a next head once the answer has gone. Empty lines between messages don't extend the time."""
        if not (self._has_upgraded or self._is_answering):
            due_s = self.loop.time() + self.timeout_keep_alive if due_s is None else due_s
            self.timeout_keep_alive_task = self.loop.call_at(due_s, self.timeout_keep_alive_handler)

    def _watch(self) -> None:
        """Start the timer for a body, or for a head while no answer is being sent, unless it runs already."""
        if self._timer is None and not self._has_upgraded and not (self._in_head and self._is_answering):
            self._begun_s = self.loop.time()
            self._set_timer(self._begun_s + self.head_timeout_s)

    def _set_timer(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self.loop.call_at(due_s, self._expire)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """Refuse a head or body that is late, if that is the client's fault."""
        now_s, self._timer = self.loop.time(), None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or now_s > self._due_s + _LATE_S:
            self._watch()
            return
        due_s = self._begun_s + self.head_timeout_s
        due_s += 0 if self._in_head else self._body_bytes / _BODY_BYTES_PER_S
        if now_s < due_s:
            self._set_timer(due_s)
        else:
            what = "head" if self._in_head else "body"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"The request's {what} did not come in time.")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Send the refusal, unless another answer is due first, and read nothing more."""
        self._unwatch()
        if self._in_head:
            tells = not self._is_answering
        else:
            tells = self._is_answering and not (self.pipeline or self.cycle.response_started)
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if tells:
            response = refusal_response(status, reason, _CODES[status], {"Connection": "close"})
            lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in response.raw_headers), b"\r\n"]
            self.transport.write(b"".join([*lines, bytes(response.body)]))
        if tells and self.transport.can_write_eof():
            self._lingers = True
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _probe(self) -> None:
        """Check repeatedly, until the answer has gone, that a client that has closed its side is still there."""
        if self.transport.is_closing() or not self._is_answering:
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(_PROBE_S, self._probe)


def seconds_unread(receive: object) -> float:
    """Return how long a request's last bytes have waited in their socket, because the event loop was busy.

    receive: of an ASGI application. 0 unless it is uvicorn's, on Linux: ASGI does not show the connection. Data that
        comes resets the time, so a connection's idle time before a request is not part of it.
    """
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux":
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_MS.size)
    except OSError:  # it has closed, or is no TCP connection
        return 0.0
    return float(_LAST_DATA_MS.unpack(info)[0] / 1000) if len(info) == _LAST_DATA_MS.size else 0.0


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Let the end of the connection end a response without a length, because HTTP/1.0 has no chunks."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        is_measured = True

        async def send_on(message: Message) -> None:
            nonlocal is_measured
            if message["type"] == "http.response.start":
                is_measured = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
                cycle.chunked_encoding = None if is_measured else False
            elif not is_measured:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_on)

    return run
