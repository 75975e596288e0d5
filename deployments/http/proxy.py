"""Middleware of Serve's proxy process, which reports to clients that their coordinator has died.

Serve imports `middlewares` by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH. Must not import slow modules.
"""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import UnavailableError
from deployments.answers.events import event, typed_event
from deployments.validation.errors import anthropic_body, body_of, error_response, status_of

CALLBACK = "deployments.http.proxy:middlewares"

_LOST = UnavailableError("the coordinator that answered has died; ask again")
_REQUEST_ID = "X-Request-Id"


def middlewares() -> list[Middleware]:
    """Middlewares for Serve's proxy, called by Serve."""
    return [Middleware(CoordinatorLossMiddleware)]


class CoordinatorLossMiddleware:
    """ASGI middleware that ends a broken stream with an error event, and answers 503 if no response began."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = has_ended = is_stream = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun, has_ended, is_stream
            if message["type"] == "http.response.start":
                has_begun = True
                is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, send_on)
        if not has_begun:
            response = error_response(_LOST)
            response.headers[_REQUEST_ID] = Headers(scope=scope).get(_REQUEST_ID, "")  # Serve has set it
            await response(scope, receive, send)
        elif is_stream and not has_ended:
            await send({"type": "http.response.body", "body": _last_event(scope["path"]).encode()})


def _last_event(path: str) -> str:
    """Error event in the format of the path's streams."""
    body = body_of(_LOST)
    if path.endswith("/v1/messages"):
        return typed_event(anthropic_body(body, status_of(_LOST)))
    if not path.endswith("/v1/responses"):
        return event(body.model_dump_json(), name="error")
    fields = body.error.model_dump(include={"code", "message", "param"})
    return typed_event({"type": "error", "sequence_number": 0, **fields})
