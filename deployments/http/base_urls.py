"""Base URLs of endpoints: /NAME/v1/… is /v1/… with the endpoint NAME. ASGI middleware; knows nothing of routes."""

from collections.abc import Mapping

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.errors import InvalidRequestError

_API = "/v1/"


class BaseUrls:
    """Requests below an endpoint's own base URL go where those below /v1 go, and `request.state.endpoint` tells."""

    def __init__(self, app: ASGIApp, *, names: Mapping[str, str]) -> None:
        """names: by what stands in URLs, the endpoint's."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            prefix, path = _split(scope["path"])
            name = self._names.get(prefix)
            scope.setdefault("state", {})["endpoint"] = name
            if name is not None:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def _split(path: str) -> tuple[str, str]:
    """What stands before the first /v1/ that has something before it, and the rest; anybody may send any path."""
    start = path.find(_API, 2)
    return (path[1:start], path[start:]) if start > 0 else ("", path)


def base_names(kinds: Mapping[str, str]) -> dict[str, str]:
    """What may stand before /v1: each endpoint's name, and each kind, which is the first endpoint of it.

    kinds: by endpoint. An endpoint that is called like a kind has the URL.
    """
    firsts = {kind: name for name, kind in reversed(list(kinds.items()))}
    return firsts | {name: name for name in kinds}


def named_model(model: str, request: Request) -> str:
    """The endpoint that a request is for: what its body says, or its base URL.

    Raises:
        InvalidRequestError: neither says it, or they differ.
    """
    own: str | None = getattr(request.state, "endpoint", None)
    if not model and own is None:
        raise InvalidRequestError("model: is required", field="model")
    if model and own is not None and model != own:
        raise InvalidRequestError(f"model: is {model!r}, but this base URL is of {own!r}; leave it out", field="model")
    return model or own or ""
