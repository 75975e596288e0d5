"""Which web pages may read answers: cross-origin resource sharing. Knows no routes and no keys."""

from collections.abc import Sequence
from typing import Any

# A page from this machine. Any other page could use the server behind the user's back, unless it is configured.
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_EXPOSED_HEADERS = ["X-Request-Id", "X-Consort-Ignored-Fields", "Retry-After"]


def cors_options(origins: Sequence[str] | None) -> dict[str, Any]:
    """Options of Starlette's CORSMiddleware. origins: those of the configuration; None: pages from this machine."""
    allowed = {"allow_origin_regex": _LOCAL_PAGES} if origins is None else {"allow_origins": origins}
    return {
        **allowed,
        "allow_methods": ["*"],
        "allow_headers": ["*"],
        "expose_headers": _EXPOSED_HEADERS,
        "allow_private_network": bool(origins),
    }
