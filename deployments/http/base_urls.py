"""Base URLs of endpoints: /NAME/v1/… is /v1/… with the endpoint NAME. ASGI middleware; knows nothing of routes."""

from collections.abc import Mapping

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.errors import InvalidRequestError

_API = "/v1/"


class BaseUrls:
    """Routes /NAME/v1/… as /v1/… and puts the endpoint's name, or None, into `request.state.endpoint`."""

    def __init__(self, app: ASGIApp, *, names: Mapping[str, str]) -> None:
        """names: endpoint by the name that URLs have."""
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
    """Split a path into the name before /v1/ and the rest. Name "": the path begins with /v1/ or has none."""
    start = path.find(_API, 2)
    return (path[1:start], path[start:]) if start > 0 else ("", path)


def base_url_names(kinds: Mapping[str, str]) -> dict[str, str]:
    """Endpoint by the names that may precede /v1: its own, and its kind's for the first endpoint of a kind.

    kinds: kind by endpoint. An endpoint's own name goes before a kind of that name.
    """
    firsts = {kind: name for name, kind in reversed(list(kinds.items()))}
    return firsts | {name: name for name in kinds}


def resolve_model(model: str, request: Request) -> str:
    """Endpoint that a request is for, named by `model` or by its base URL.

    Raises:
        InvalidRequestError: neither names it, or they differ.
    """
    own: str | None = getattr(request.state, "endpoint", None)
    if not model and own is None:
        raise InvalidRequestError("model: is required", field="model")
    if model and own is not None and model != own:
        raise InvalidRequestError(f"model: is {model!r}, but this base URL is of {own!r}; leave it out", field="model")
    return model or own or ""
