"""Names of models, endpoints and keys. An endpoint's base URL starts with its name, so no route may have that name."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from decoding.errors import ConfigError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=200)]

# The first segments of all routes, FastAPI's own included.
RESERVED = {
    "compress",
    "detokenize",
    "docs",
    "health",
    "metrics",
    "openapi.json",
    "page",
    "ready",
    "redoc",
    "scale",
    "tokenize",
    "v1",
    "version",
}


def check_names(endpoints: Iterable[str]) -> None:
    """Raise ConfigError if an endpoint's base URL would collide with a route."""
    for name in endpoints:
        first = name.split("/")[0]
        if first in RESERVED:
            reason = f"/{first} is a route of the server, and /{name}/v1 would be the endpoint's; take another name"
            raise ConfigError(f"endpoints.{name}: {reason}")
