"""How each request ended: for the access log and for the metrics."""

import json
import logging
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.head import is_work, seconds_since_arrival
from deployments.monitoring.metrics import Outcome

Record = Callable[[str, str, Outcome], None]  # endpoint, name of the API key, outcome
_REASONS = {HTTPStatus.UNAUTHORIZED: "unauthorized", HTTPStatus.SERVICE_UNAVAILABLE: "unavailable"}
_logger = logging.getLogger("consort.access")


def log_requests() -> None:
    """Log requests to standard error from now on, one JSON line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def log_refused(key: str, reason: str, requests: int) -> None:
    """Log requests that the proxy has refused, on one line."""
    if _logger.isEnabledFor(logging.INFO):
        status = int(HTTPStatus.TOO_MANY_REQUESTS)
        line = {"time": round(time.time(), 3), "status": status, "key": key, "outcome": reason, "requests": requests}
        _logger.info(json.dumps(line))


class OutcomeMiddleware:
    """ASGI middleware that records each request for text or tokens once it has ended.

    Others put into the request's state what is known of it: `key`, `request_id`, `endpoint` and `error`.
    """

    def __init__(self, app: ASGIApp, *, record: Record, endpoints: Collection[str]) -> None:
        self._app, self._record = app, record
        self._endpoint = next(iter(endpoints)) if len(endpoints) == 1 else ""  # of requests that name none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_s = time.monotonic() - seconds_since_arrival(Headers(scope=scope), time.time())
        status, has_ended = 0, False
        state: dict[str, Any] = scope.setdefault("state", {})
        state["arrived_s"] = arrived_s

        async def send_on(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_on)
        except ClientDisconnect:
            pass  # while sending its body: there is nobody to answer
        except Exception as error:  # an outer layer answers
            state["error"], status, has_ended = error, HTTPStatus.INTERNAL_SERVER_ERROR, True
            raise
        finally:
            outcome = _outcome(status, state.get("error"), has_ended=has_ended)
            self._end(scope, status, outcome, time.monotonic() - arrived_s)

    def _end(self, scope: Scope, status: int, outcome: Outcome, seconds: float) -> None:
        state = scope["state"]
        key = state.get("key")
        if is_work(scope):
            self._record(state.get("endpoint") or self._endpoint, "" if key is None else key.name, outcome)
        if not _logger.isEnabledFor(logging.INFO):
            return
        line = {
            "request_id": state.get("request_id"),
            "time": round(time.time(), 3),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "key": None if key is None else key.name,
            "outcome": outcome.reason or "answered",
        }
        _logger.info(json.dumps(line))


def _outcome(status: int, error: Exception | None, *, has_ended: bool) -> Outcome:
    if error is not None:
        return Outcome.from_error(error)
    if not has_ended:
        return Outcome("aborted")  # its client hung up
    if status < HTTPStatus.BAD_REQUEST:
        return Outcome()
    default = "invalid_request" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "internal_error"
    return Outcome(_REASONS.get(HTTPStatus(status), default))
