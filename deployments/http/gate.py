"""Who may ask: hosts, origins, API keys, and the size of bodies."""

from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.apis.errors import refusal_response
from deployments.configuration.api_keys import ApiKey, KeyRing
from deployments.http.head import REQUEST_ID, authorization_of, content_length, on_start, request_id_of
from deployments.http.page import is_page

_OPEN_PATHS = {"/health", "/ready"}  # answered without a key
# A page from this machine. Any other page could use the server behind the user's back, unless it is configured.
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"


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
        "expose_headers": [REQUEST_ID, "X-Consort-Ignored-Fields", "Retry-After"],
        "allow_private_network": bool(origins),
    }


def admins_only(request: Request) -> None:
    """FastAPI dependency that raises HTTPException if the API key is not an admin's."""
    key: ApiKey = request.state.key
    if not key.admin:
        reason = f"the API key {key.name!r} may not; use an admin's, or set http.api_keys.{key.name}.admin: true"
        raise HTTPException(HTTPStatus.FORBIDDEN, reason)


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
