"""What Serve's proxy runs around the application, in its own process: the last word when a coordinator has died.

Serve imports it where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `deployments.http.proxy:middlewares`. It must
not import what takes long, and knows of requests only their paths.
"""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import UnavailableError
from deployments.answers.events import event, typed_event
from deployments.validation.errors import body_of, error_answer

CALLBACK = "deployments.http.proxy:middlewares"

_LOST = UnavailableError("the coordinator that answered has died; ask again")
_REQUEST_ID = "X-Request-Id"


def middlewares() -> list[Middleware]:
    """What Serve asks for."""
    return [Middleware(LastWord)]


class LastWord:
    """ASGI middleware. An answer that breaks off ends with an error; one that never began is a 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = ended = streams = False

        async def send_on(message: Message) -> None:
            nonlocal began, ended, streams
            if message["type"] == "http.response.start":
                began = True
                streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, send_on)
        if not began:
            answer = error_answer(_LOST)
            answer.headers[_REQUEST_ID] = Headers(scope=scope).get(_REQUEST_ID, "")  # Serve has put it there
            await answer(scope, receive, send)
        elif streams and not ended:
            await send({"type": "http.response.body", "body": _last_event(scope["path"]).encode()})


def _last_event(path: str) -> str:
    """As streams of that path tell of errors."""
    body = body_of(_LOST)
    if not path.endswith("/v1/responses"):
        return event(body.model_dump_json(), name="error")
    told = body.error.model_dump(include={"code", "message", "param"})
    return typed_event({"type": "error", "sequence_number": 0, **told})
