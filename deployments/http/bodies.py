"""Reads and checks request bodies, large ones off the event loop. Knows no fields."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from decoding.errors import InvalidRequestError
from deployments.fields.strict import most_values, read_json

SMALL_BYTES = 2**15  # larger bodies are read in a thread

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_IGNORED = "X-Consort-Ignored-Fields"
_log = logging.getLogger(__name__)
_NO_JSON = "The body: should be JSON; send the header Content-Type: application/json"


class SmallBodyRoute(APIRoute):
    """FastAPI's route, for small bodies only, because it parses them in the event loop."""

    def get_route_handler(self) -> _Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def bounded(request: Request) -> Response:
            if len(await request.body()) > SMALL_BYTES:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {SMALL_BYTES} bytes."
                )
            return await handle(request)

        return bounded


def large_body_route(max_body_bytes: int) -> type[APIRoute]:
    """Route class for functions that take `body`, a pydantic model, and `request`, and return a response."""
    reading = ThreadPoolExecutor(1, thread_name_prefix="reading")
    max_values = most_values(max_body_bytes)

    class LargeBodyRoute(APIRoute):
        """Parses bodies itself, large ones in a thread. `request.state.large` is whether the body was large."""

        def get_route_handler(self) -> _Handler:
            assert self.body_field is not None
            model = self.body_field.field_info.annotation
            assert isinstance(model, type)

            async def handle(request: Request) -> Response:
                content = await request.body()
                if content and not _is_json(request.headers.get("Content-Type", "")):
                    raise InvalidRequestError(_NO_JSON)
                read = partial(read_json, content, model, max_values=max_values)
                request.state.large = len(content) > SMALL_BYTES
                loop = asyncio.get_running_loop()
                body, ignored = await loop.run_in_executor(reading, read) if request.state.large else read()
                response: Response = await self.endpoint(body=body, request=request)
                ignored = [*ignored, *getattr(request.state, "ignored", ())]  # the endpoint knows of more
                if ignored:
                    _warn_once(names := ", ".join(filter(_is_header_text, ignored)))
                    response.headers[_IGNORED] = names
                return response

            return handle

    return LargeBodyRoute


@lru_cache(maxsize=1024)
def _warn_once(names: str) -> None:
    _log.warning("requests have fields that are ignored: %s", names)


def _is_header_text(name: str) -> bool:
    return name.isascii() and name.isprintable()


def _is_json(content_type: str) -> bool:
    header = Message()
    header["Content-Type"] = content_type[:200]
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))
