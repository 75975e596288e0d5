"""Serves the playground at `/`, without an API key."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

_FOLDER = Path(__file__).parents[2] / "playground"
# Nothing from other origins, no inline code, no text turned into markup but by the sanitiser, no frames.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # revalidated each time; the usual response is a short 304
}
_PATHS = {"/", *(f"/page/{file.relative_to(_FOLDER).as_posix()}" for file in _FOLDER.rglob("*.*"))}


class _Page(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def is_page(path: str) -> bool:
    """Whether the path is one of the page's files, which need no key."""
    return path in _PATHS


def add_page(api: FastAPI) -> None:
    """Add GET / and the files of the page."""
    page = _Page(directory=_FOLDER)

    async def index(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    api.add_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    api.mount("/page", page)
