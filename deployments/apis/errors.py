"""Errors as the clients of each API expect them, in bodies and as server-sent events."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from decoding.errors import (
    ConsortError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    UnknownTurnError,
)
from deployments.fields.strict import printable, problem_in

_LONGEST_MESSAGE = 2000  # characters; messages may quote what the client sent
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# The first class that fits says the status, and `type` and `code` of the body.
_KINDS: tuple[tuple[type[ConsortError], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnknownTurnError, 404, "invalid_request_error", "previous_response_not_found"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (OverloadedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineError, 408, "timeout_error", "deadline_exceeded"),
    (UnavailableError, 503, "server_error", "unavailable"),
)
_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
)
Api = Literal["openai", "responses", "messages"]  # whose errors have a format of their own
_logger = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong, and the field to change (`param`), if any."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every response that is not 2xx."""

    error: ErrorDetail


def _status_and_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return HTTP status and body for an error. Unexpected errors show no details."""
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            field = error.field if isinstance(error, InvalidRequestError) else None
            return status, _body(str(error), name, field, code)
    return 500, _body("Internal error; the server's log has more.", "server_error", code="internal_error")


def api_of(path: str) -> Api:
    """Return whose format of errors a path has. An endpoint's base URL may precede it."""
    if path.endswith(("/v1/messages", "/v1/messages/count_tokens")):
        return "messages"
    return "responses" if path.endswith("/v1/responses") else "openai"


def _messages_body(body: ErrorBody, status: int) -> dict[str, Any]:
    detail = body.error.model_dump() | {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error")}
    return {"type": "error", "error": detail}


class ErrorResponse(JSONResponse):
    """An error, in the format of the API that was asked."""

    def __init__(self, body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> None:
        self._error = body
        super().__init__(body.model_dump(), status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if api_of(scope["path"]) == "messages":
            self.body = self.render(_messages_body(self._error, self.status_code))
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def refusal_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> ErrorResponse:
    """Response to a request that is refused whatever its body says: no key, too large."""
    return ErrorResponse(_body(message, "invalid_request_error", code=code), status, headers)


def error_response(error: Exception) -> ErrorResponse:
    """Response to a request that raised the error."""
    status, body = _status_and_body(error)
    headers = None
    if isinstance(error, OverloadedError | UnavailableError):
        headers = {"Retry-After": str(error.retry_after_s)}
    return ErrorResponse(body, status, headers)


def sse(data: str, *, name: str | None = None) -> str:
    """Format a server-sent event. data: one line of JSON. name: its type."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def typed_sse(data: dict[str, Any]) -> str:
    """Format a server-sent event that is named after the `type` in its data."""
    return sse(msgspec.json.encode(data).decode(), name=data["type"])


def error_event(error: Exception, api: Api, *, sequence_number: int = 0) -> str:
    """Server-sent event that ends a failed stream. sequence_number: of the event, for responses."""
    status, body = _status_and_body(error)
    match api:
        case "messages":
            return typed_sse(_messages_body(body, status))
        case "responses":
            detail = body.error.model_dump(include={"code", "message", "param"})
            return typed_sse({"type": "error", "sequence_number": sequence_number, **detail})
        case "openai":
            return sse(body.model_dump_json(), name="error")


def install_error_handlers(api: FastAPI) -> None:
    """Answer every error of the application with an `ErrorBody`."""
    api.add_exception_handler(ConsortError, _on_error)
    api.add_exception_handler(Exception, _on_error)
    api.add_exception_handler(RequestValidationError, _on_invalid_body)
    api.add_exception_handler(HTTPException, _on_http_error)


async def _on_error(request: Request, error: Exception) -> ErrorResponse:
    request.state.error = error
    response = error_response(error)
    if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        _logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response


async def _on_invalid_body(_: Request, error: Exception) -> ErrorResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI parses JSON only under the right Content-Type
        message = "The body: should be JSON; send the header Content-Type: application/json"
        return ErrorResponse(_body(message, "invalid_request_error"), HTTPStatus.BAD_REQUEST)
    path, problem = problem_in(error.errors()[0])
    field = path.removeprefix("body").removeprefix("query").removeprefix(".")
    message = f"{field or 'The body'}: {problem}"
    return ErrorResponse(_body(message, "invalid_request_error", field or None), HTTPStatus.BAD_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> ErrorResponse:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {error.detail}"
    if error.status_code == HTTPStatus.NOT_FOUND:  # base URLs lack their /v1, or have it twice
        meant = (route for route in _ROUTES if path != route and path.endswith(route.removeprefix("/v1")))
        message += next((f"; did you mean {route}?" for route in meant), "")
    body = _body(message, "invalid_request_error", code=HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return ErrorResponse(body, error.status_code, error.headers)


def _body(message: str, kind: str, field: str | None = None, code: str | None = None) -> ErrorBody:
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    field = field and printable(field[:_LONGEST_MESSAGE])
    return ErrorBody(error=ErrorDetail(message=printable(message), type=kind, param=field, code=code))
