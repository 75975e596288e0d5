"""Refuses what can't be taken on before anything is done for it: at overload, refusals must cost next to nothing."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from decoding.errors import OverloadedError
from deployments.http.errors import error_answer
from deployments.http.keys import ApiKey

GENERATING_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}


class Turnstile:
    """ASGI middleware, behind those that find the key and the path."""

    def __init__(self, app: ASGIApp, *, check: Callable[[ApiKey, str | None], None]) -> None:
        """
        check: raises OverloadedError where a request with that key would be refused, whatever it says. It is told the
            endpoint, too, if the URL names it.
        """
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
            try:
                self._check(scope["state"]["key"], scope["state"].get("endpoint"))
            except OverloadedError as error:
                await error_answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
