"""Checks every request first: request id, API key, size of the body. Knows no fields."""

import re
import secrets
from http import HTTPStatus

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.apis.errors import refusal_response
from deployments.configuration.api_keys import ApiKey, KeyRing
from deployments.http.page import is_page

_OPEN_PATHS = {"/health", "/ready"}  # answered without a key
_REQUEST_ID = "X-Request-Id"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


def admins_only(request: Request) -> None:
    """FastAPI dependency that raises HTTPException if the API key is not an admin's."""
    key: ApiKey = request.state.key
    if not key.admin:
        reason = f"the API key {key.name!r} may not; use an admin's, or set http.api_keys.{key.name}.admin: true"
        raise HTTPException(HTTPStatus.FORBIDDEN, reason)


class Gate:
    """ASGI middleware that sets `key` and `request_id` in the request's state."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, max_body_bytes: int, add_request_id: bool = True) -> None:
        """add_request_id: whether to add the request's id to responses; Serve's proxy does so by itself."""
        self._app, self._keys, self._max_body_bytes, self._tell_id = app, keys, max_body_bytes, add_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        send = _with_id(send, request_id) if self._tell_id else send
        key = self._keys.find(authorization_of(headers))
        scope.setdefault("state", {}).update(key=key, request_id=request_id)
        if key is None and scope["path"] not in _OPEN_PATHS and not is_page(scope["path"]):
            reason = "A valid API key is needed: Authorization: Bearer KEY."
            response = refusal_response(401, reason, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        if _announced_bytes(headers) > self._max_body_bytes:
            await refusal_response(413, self._too_large, "body_too_large")(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    @property
    def _too_large(self) -> str:
        return f"The body is larger than {self._max_body_bytes} bytes."

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


def _with_id(send: Send, request_id: str) -> Send:
    """Wrap send to add the request's id to the response headers."""

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[_REQUEST_ID] = request_id
        await send(message)

    return send_on


def authorization_of(headers: Headers) -> str | None:
    """The Authorization header, or the API key as Anthropic's clients send it."""
    key = headers.get("X-Api-Key")
    return headers.get("Authorization") or (None if key is None else f"Bearer {key}")


def request_id_of(headers: Headers) -> str:
    """The client's request id if it is safe to repeat, or a new one."""
    given = headers.get(_REQUEST_ID, "")
    return given if _GOOD_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _announced_bytes(headers: Headers) -> int:
    length = headers.get("Content-Length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
