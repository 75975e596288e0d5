"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} under the right status."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from decoding.errors import (
    ConsortError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from deployments.fields.strict import first_problem, printable

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


def status_of(error: Exception) -> int:
    """HTTP status for an error."""
    match error:
        case UnknownModelError():
            return HTTPStatus.NOT_FOUND
        case InvalidRequestError():
            return HTTPStatus.BAD_REQUEST
        case OverloadedError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case DeadlineError():
            return HTTPStatus.REQUEST_TIMEOUT
        case UnavailableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def body_of(error: Exception) -> ErrorBody:
    """Response body for an error. Unexpected errors show no details."""
    field = error.field if isinstance(error, InvalidRequestError) else None
    match error:
        case UnknownModelError():
            return _body(str(error), "invalid_request_error", field, "model_not_found")
        case ContextLengthError():
            return _body(str(error), "invalid_request_error", field, "context_length_exceeded")
        case InvalidRequestError():
            return _body(str(error), "invalid_request_error", field)
        case OverloadedError():
            return _body(str(error), "rate_limit_error", code="rate_limit_exceeded")
        case DeadlineError():
            return _body(str(error), "timeout_error", code="deadline_exceeded")
        case UnavailableError():
            return _body(str(error), "server_error", code="unavailable")
        case _:
            return _body("Internal error; the server's log has more.", "server_error", code="internal_error")


def anthropic_body(body: ErrorBody, status: int) -> dict[str, Any]:
    """Return the error as Anthropic's clients expect it."""
    detail = body.error.model_dump() | {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error")}
    return {"type": "error", "error": detail}


def refusal_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Response to a request that is refused whatever its body says: no key, too large."""
    return JSONResponse(_body(message, "invalid_request_error", code=code).model_dump(), status, headers)


def error_response(error: Exception) -> JSONResponse:
    """Response to a request that raised the error."""
    return JSONResponse(body_of(error).model_dump(), status_of(error), _headers(error))


def install_error_handlers(api: FastAPI) -> None:
    """Answer every error of the application with an `ErrorBody`."""
    api.add_exception_handler(ConsortError, _on_error)
    api.add_exception_handler(Exception, _on_error)
    api.add_exception_handler(RequestValidationError, _on_invalid_body)
    api.add_exception_handler(HTTPException, _on_http_error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    request.state.error = error
    status = status_of(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error)


def _headers(error: Exception) -> dict[str, str] | None:
    match error:
        case OverloadedError() | UnavailableError():
            return {"Retry-After": str(error.retry_after_s)}
        case _:
            return None


async def _on_invalid_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):  # FastAPI parses JSON only under the right Content-Type
        message = "The body: should be JSON; send the header Content-Type: application/json"
        return JSONResponse(_body(message, "invalid_request_error").model_dump(), HTTPStatus.BAD_REQUEST)
    path, problem = first_problem(error.errors())
    field = path.removeprefix("body").removeprefix(".")
    message = f"{field or 'The body'}: {problem}"
    return JSONResponse(_body(message, "invalid_request_error", field or None).model_dump(), HTTPStatus.BAD_REQUEST)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = _body(message, "invalid_request_error", code=HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"))
    return JSONResponse(body.model_dump(), error.status_code, error.headers)


def _body(message: str, kind: str, field: str | None = None, code: str | None = None) -> ErrorBody:
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "…"
    field = field and printable(field[:_LONGEST_MESSAGE])
    return ErrorBody(error=ErrorDetail(message=printable(message), type=kind, param=field, code=code))
