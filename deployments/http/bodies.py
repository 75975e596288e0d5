"""Request bodies: refuses them under overload before they are read, and reads large ones off the event loop."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message as MailMessage
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import InvalidRequestError, OverloadedError
from deployments.apis.errors import error_response
from deployments.configuration.api_keys import ApiKey
from deployments.fields.strict import most_values, read_json
from deployments.http.head import GENERATING, content_length, is_work

SMALL_BYTES = 2**15  # larger bodies are read in a thread
_BODIES_AT_ONCE = 8  # of the largest size; a parsed body takes several times its bytes
_IGNORED = "X-Consort-Ignored-Fields"
_NO_JSON = "The body: should be JSON; send the header Content-Type: application/json"

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_log = logging.getLogger(__name__)


class EarlyRefusal:
    """ASGI middleware that refuses work beyond the bounds, before its body is read. Runs after `Gate` and `BaseUrls`.

    `request.state.end_arrival` is what to call once the request is submitted.
    """

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
        state = scope["state"]
        size = self._bytes_to_hold(content_length(Headers(scope=scope)))
        try:
            if size and self._held_bytes + size > (most := _BODIES_AT_ONCE * self._max_body_bytes):
                reason = f"with {size} more, the bodies of requests in progress would exceed {most} bytes"
                raise OverloadedError(f"{reason}, {_BODIES_AT_ONCE} times http.max_body_bytes.")
            if scope["path"] in GENERATING:
                state["end_arrival"] = self._enter(state["key"], state.get("endpoint"))
            else:
                self._check_bounds(state["key"])
        except OverloadedError as error:
            state["error"] = error
            await error_response(error)(scope, receive, send)
            return
        self._held_bytes += size
        received = 0

        async def count_received() -> Message:
            """Receive; once the whole body is here, hold what it really takes."""
            nonlocal size, received
            message = await receive()
            received += len(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                actual = min(size, self._bytes_to_hold(received))
                self._held_bytes -= size - actual
                size = actual
            return message

        try:
            await self._app(scope, count_received, send)
        finally:
            self._held_bytes -= size
            if "end_arrival" in state:
                state["end_arrival"]()

    def _bytes_to_hold(self, length: int | None) -> int:
        """Return what a body counts for: 0 if it is small, the most if its length is unknown."""
        size = self._max_body_bytes if length is None else length
        return 0 if size <= SMALL_BYTES else min(size, self._max_body_bytes)


class SmallBodyRoute(APIRoute):
    """FastAPI's route, for small bodies only, because it parses them in the event loop."""

    def get_route_handler(self) -> _Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def bounded(request: Request) -> Response:
            if len(await request.body()) > SMALL_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {SMALL_BYTES} bytes."
                )
            return await handle(request)

        return bounded


def large_body_route(max_body_bytes: int) -> type[APIRoute]:
    """Route class for functions that take `body`, a pydantic model, and `request`, and return a response."""
    reading = ThreadPoolExecutor(1, thread_name_prefix="reading")
    max_values = most_values(max_body_bytes)

    class LargeBodyRoute(APIRoute):
        """Parses bodies itself, large ones in a thread. `request.state.large` is whether the body was large."""

        def get_route_handler(self) -> _Handler:
            assert self.body_field is not None
            model = self.body_field.field_info.annotation
            assert isinstance(model, type)

            async def handle(request: Request) -> Response:
                content = await request.body()
                if content and not _is_json(request.headers.get("Content-Type", "")):
                    raise InvalidRequestError(_NO_JSON)
                read = partial(read_json, content, model, max_values=max_values)
                request.state.large = len(content) > SMALL_BYTES
                loop = asyncio.get_running_loop()
                body, ignored = await loop.run_in_executor(reading, read) if request.state.large else read()
                response: Response = await self.endpoint(body=body, request=request)
                ignored = [*ignored, *getattr(request.state, "ignored", ())]  # the endpoint knows of more
                if ignored:
                    _warn_once(names := ", ".join(name for name in ignored if name.isascii() and name.isprintable()))
                    response.headers[_IGNORED] = names
                return response

            return handle

    return LargeBodyRoute


@lru_cache(maxsize=1024)
def _warn_once(names: str) -> None:
    _log.warning("requests have fields that are ignored: %s", names)


def _is_json(content_type: str) -> bool:
    header = MailMessage()
    header["Content-Type"] = content_type[:200]
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))
