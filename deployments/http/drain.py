"""Stopping: the server refuses new requests, and gives those in progress time to end."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import UnavailableError
from deployments.apis.errors import error_response
from deployments.http.head import is_work


class Drain:
    """Counts the requests in progress, and waits for their end. For use in one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_served = False  # whether any request came
        self._in_progress, self._idle = 0, asyncio.Event()

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.has_served = True
        self._in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()

    async def run(self, drain_s: float) -> int:
        """Refuse new requests from now on, and wait for the others. Returns how many are left after `drain_s`."""
        self.has_begun = True
        if self._in_progress:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        return self._in_progress


class DrainMiddleware:
    """ASGI middleware that counts requests for text or tokens, and answers 503 once the server stops.

    A request is in progress from when its body has come whole: the server waits for no client that sends half of one.
    """

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        if self._drain.has_begun:
            scope["state"]["error"] = error = _stopping()
            await error_response(error)(scope, receive, send)
            return
        with ExitStack() as stack:
            has_come = False

            async def receive_whole() -> Message:
                nonlocal has_come
                message = await receive()
                if message["type"] == "http.request" and not (message.get("more_body") or has_come):
                    if self._drain.has_begun:
                        raise _stopping()  # the application answers it as any other
                    stack.enter_context(self._drain.hold())
                    has_come = True
                return message

            await self._app(scope, receive_whole, send)


def _stopping() -> UnavailableError:
    return UnavailableError("this server is stopping; ask again", retry_after_s=1)
