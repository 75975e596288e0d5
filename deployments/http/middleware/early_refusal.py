"""Refuses requests before their bodies are read, so that refusals stay cheap under overload. Knows no fields."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import OverloadedError
from deployments.apis.errors import error_response
from deployments.configuration.api_keys import ApiKey
from deployments.http.bodies import SMALL_BYTES
from deployments.http.middleware.paths import GENERATING, is_work

_BODIES_AT_ONCE = 8  # of the largest size; a parsed body takes several times its bytes


class EarlyRefusal:
    """ASGI middleware that refuses work beyond the bounds. Runs after `Gate` and `BaseUrls`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        enter: Callable[[ApiKey, str | None], Callable[[], None]],
        check_bounds: Callable[[ApiKey], None],
        max_body_bytes: int,
    ) -> None:
        """
        enter: counts a generating request until what it returns is called, at the latest when the request has ended;
            raises OverloadedError if any with that key would be refused; gets the endpoint if the URL names it.
        check_bounds: raises OverloadedError if any request with that key would be refused.
        max_body_bytes: bound of one body; bodies in progress may have a few times as many together.
        """
        self._app, self._enter, self._check_bounds = app, enter, check_bounds
        self._max_body_bytes, self._held_bytes = max_body_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        size = self._body_bytes(Headers(scope=scope))
        try:
            self._check_bytes(size)
            if scope["path"] in GENERATING:
                leave = self._enter(scope["state"]["key"], scope["state"].get("endpoint"))
            else:
                self._check_bounds(scope["state"]["key"])
                leave = _nothing
        except OverloadedError as error:
            scope["state"]["error"] = error
            await error_response(error)(scope, receive, send)
            return
        self._held_bytes += size
        received = 0
        scope["state"]["leave"] = leave

        async def count_received() -> Message:
            """Receive; once the whole body is here, hold what it really takes."""
            nonlocal size, received
            message = await receive()
            received += len(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                actual = min(size, received if received > SMALL_BYTES else 0)
                self._held_bytes -= size - actual
                size = actual
            return message

        try:
            await self._app(scope, count_received, send)
        finally:
            self._held_bytes -= size
            leave()

    def _body_bytes(self, headers: Headers) -> int:
        """Most bytes of the request's body; small bodies count as 0."""
        length = headers.get("Content-Length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else self._max_body_bytes
        return 0 if size <= SMALL_BYTES else min(size, self._max_body_bytes)

    def _check_bytes(self, size: int) -> None:
        most = _BODIES_AT_ONCE * self._max_body_bytes
        if size and self._held_bytes + size > most:
            reason = f"with {size} more, the bodies of requests in progress would exceed {most} bytes"
            raise OverloadedError(f"{reason}, {_BODIES_AT_ONCE} times http.max_body_bytes.")


def _nothing() -> None:
    """Other requests are not counted."""
