"""Errors of Anthropic's API in its format, wherever they arise. ASGI middleware; knows nothing of their causes."""

import json

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.apis.errors import ErrorBody, anthropic_body

_PATH = "/v1/messages"


class AnthropicErrors:
    """Rewrites the bodies of errors below /v1/messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_messages_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def send_on(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message  # its length changes with the body
                return
            if start is not None:
                error = ErrorBody.model_validate_json(message["body"])
                body = json.dumps(anthropic_body(error, start["status"])).encode()
                MutableHeaders(scope=start)["Content-Length"] = str(len(body))
                message = {"type": "http.response.body", "body": body}
                await send(start)
            await send(message)

        await self._app(scope, receive, send_on)


def is_messages_path(path: str) -> bool:
    """Whether the path belongs to Anthropic's API, below an endpoint's base URL or not."""
    return path.endswith((_PATH, f"{_PATH}/count_tokens"))
