"""Names of models, endpoints and keys. An endpoint's base URL starts with its name, so no route may have that name."""

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from decoding.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*")


def _check_name(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("name", "is no text; put the name in quotes")
    if not _NAME.fullmatch(value):
        raise PydanticCustomError(
            "name", "should have only letters, digits and . _ / : - in its name, and begin with a letter or a digit"
        )
    return value


Name = Annotated[str, BeforeValidator(_check_name), Field(max_length=200)]

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


def check_names(key: str, names: Iterable[str]) -> None:
    """Raise ConfigError if the base URL of an endpoint or adapter would be a route's. key: where the names are."""
    for name in names:
        first = name.split("/")[0]
        if first in RESERVED:
            reason = f"/{first} is a route of the server, and /{name}/v1 would be its base URL; take another name"
            raise ConfigError(f"{key}.{name}: {reason}")
