"""Answers only requests for this server's own names, against DNS rebinding. Knows no keys and no fields.

A web page can let its own name resolve to 127.0.0.1. Then it has the same origin as what listens there, and CORS does
not keep it out. But its requests still name its own host.
"""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.apis.errors import refusal_response


class HostCheck:
    """ASGI middleware that refuses requests whose Host header names another server."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        """allowed: names or addresses, without ports."""
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (name := _host_name(Headers(scope=scope))) not in self._allowed:
            reason = f"The Host header names {name!r}, which is not this server; add it to http.allowed_hosts."
            await refusal_response(421, reason, "wrong_host")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host_name(headers: Headers) -> str:
    """The host of a request, without its port: a name, or an address, in brackets if it has colons."""
    host = headers.get("Host", "").lower()
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
