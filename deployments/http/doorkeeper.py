"""Refuses requests in Serve's proxy, before their bodies and the way to a coordinator, by what coordinators write on
their boards. ASGI middleware of the proxy; knows no fields. Must not import slow modules.

Coordinators name their boards in responses. What no board says is a coordinator's to decide.
"""

import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decoding.errors import OverloadedError
from deployments.apis.errors import anthropic_body, body_of, error_response
from deployments.configuration.api_keys import secret_digest
from deployments.http.admission_board import NO_KEY, AdmissionBoard, Notice
from deployments.http.head import authorization_of, is_anthropic, is_generating, request_id_of

PASSED = "x-consort-passed"  # request header: the proxy's random number, and the request's among those of its key
BOARD = "x-consort-board"  # response header: the name of the coordinator's board
STALE_S = 3.0  # an older notice may be wrong
_ON_THE_WAY_S = 5.0  # a request that was passed on longer ago is lost


class Doorkeeper:
    """Passes on as many requests of a key as the boards of the node's coordinators allow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._proxy = 1 + secrets.randbelow(10**9 - 1)  # processes of two nodes may have the same id
        self._boards: dict[str, AdmissionBoard] = {}
        self._strange: set[str] = set()  # names of boards that are out of reach: on other nodes
        self._passed: dict[bytes, tuple[int, float]] = {}  # by key: how many requests, and when the last one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        passed = f"{self._proxy}:"
        if is_generating(scope):
            key = self._key_of(headers)
            error = self._refusal(key) if "origin" not in headers else None  # browsers' need more headers
            if error is not None:
                await _response(error, scope["path"], request_id_of(headers))(scope, receive, send)
                return
            passed += str(self._count_passed(key))
        others = [(name, value) for name, value in scope["headers"] if name != PASSED.encode()]
        scope = {**scope, "headers": [*others, (PASSED.encode(), passed.encode())]}
        await self._app(scope, receive, self._without_board(send))

    def _key_of(self, headers: Headers) -> bytes:
        """Return by what boards know the request's key. Where nobody needs one, all requests have the same."""
        needs_key = any(board.needs_key for board in self._boards.values())
        return secret_digest(authorization_of(headers)) if needs_key else NO_KEY

    def _refusal(self, key: bytes) -> OverloadedError | None:
        """Return why no coordinator of this node accepts another request of the key; None: ask one."""
        notices: list[tuple[Notice, AdmissionBoard]] = []
        for name, board in list(self._boards.items()):
            notice = board.read(key)
            if not board.is_alive:
                del self._boards[name]
            elif notice is None or time.monotonic() - notice.written_s >= STALE_S:
                return None
            else:
                notices.append((notice, board))
        if not notices or sum(notice.requests for notice, _ in notices) > self._on_the_way(key, notices):
            return None
        notice, board = min(notices, key=lambda item: max(item[0].retry_s, item[0].reached.wait_s))
        since = board.refused(key) - notice.refused
        board.count_refused(key)
        return notice.reached.error(notice.retry_s + since * notice.apart_s)

    def _on_the_way(self, key: bytes, notices: list[tuple[Notice, AdmissionBoard]]) -> int:
        """Return how many requests of the key were passed on and are not seen yet."""
        number, passed_s = self._passed.get(key, (0, 0.0))
        seen = max((notice.seen for notice, _ in notices if notice.proxy == self._proxy), default=0)
        if time.monotonic() - passed_s > _ON_THE_WAY_S:
            return 0
        return max(0, number - seen)

    def _count_passed(self, key: bytes) -> int:
        """Number a request that is passed on. Without a key that boards know there is nothing to count."""
        if not any(board.knows(key) for board in self._boards.values()):
            return 0
        number = self._passed.get(key, (0, 0.0))[0] + 1
        self._passed[key] = number, time.monotonic()
        return number

    def _without_board(self, send: Send) -> Send:
        """Wrap send to read the name of the coordinator's board from the response, and take it out."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                name = headers.get(BOARD)
                if name is not None:
                    del headers[BOARD]
                    self._meet(name)
            await send(message)

        return send_on

    def _meet(self, name: str) -> None:
        if name in self._boards or name in self._strange:
            return
        board = AdmissionBoard.attach(name)
        if board is None:
            self._strange.add(name)
        else:
            board.proxy = self._proxy
            self._boards[name] = board


def _response(error: OverloadedError, path: str, request_id: str) -> JSONResponse:
    response = error_response(error)
    if is_anthropic(path):
        content = anthropic_body(body_of(error), response.status_code)
        response = JSONResponse(content, response.status_code, {"Retry-After": str(error.retry_after_s)})
    response.headers["X-Request-Id"] = request_id
    return response
