"""Serves the playground at `/` from files that are read once, without an API key."""

from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

_FOLDER = Path(__file__).parents[2] / "playground"
_PREFIX = "/page/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other origins, no inline code, no text turned into markup but by the sanitiser, no frames.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{directive} {sources}" for directive, sources in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # revalidated each time; the usual response is a short 304
}


_FILES = {path.relative_to(_FOLDER).as_posix(): path for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}
_PATHS = {"/", *(_PREFIX + name for name in _FILES)}


def is_page(path: str) -> bool:
    """Whether the path is one of the page's files, which need no key."""
    return path in _PATHS


def add_page(api: FastAPI) -> None:
    """Add GET / and the files of the page."""
    bodies = {name: path.read_bytes() for name, path in _FILES.items()}
    headers = {
        name: {**_HEADERS, "Content-Type": _TYPES[_FILES[name].suffix], "ETag": f'"{sha256(body).hexdigest()[:32]}"'}
        for name, body in bodies.items()
    }

    async def file(request: Request, name: str) -> Response:
        if name not in bodies:
            raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such file")
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
        if headers[name]["ETag"] in known:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers[name])
        return Response(bodies[name], headers=headers[name])

    async def index(request: Request) -> Response:
        return await file(request, "index.html")

    for path, route in (("/", index), (_PREFIX + "{name:path}", file)):
        api.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)
