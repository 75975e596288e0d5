"""Types of values that several parts of a configuration have."""

import importlib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, WrapValidator
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

Count = Annotated[int, Field(ge=1)]
_count: TypeAdapter[int] = TypeAdapter(Count)
CountOrAuto = Annotated[  # values other than "auto" are validated as numbers, so that the error text is about numbers
    int | Literal["auto"],
    WrapValidator(lambda value, _: value if value == "auto" else _count.validate_python(value, strict=True)),
]

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


def check_name(key: str, name: str) -> None:
    """Raise ConfigError if the base URL of an endpoint or adapter would be a route's. key: where the name is."""
    first = name.split("/")[0]
    if first in RESERVED:
        reason = f"/{first} is a route of the server, and /{name}/v1 would be its base URL; take another name"
        raise ConfigError(f"{key}.{name}: {reason}")


def load_callable(path: str, *, key: str) -> Callable[..., Any]:
    """Import the callable at `module:name`; raises ConfigError if there is none. key: of the configuration."""
    module, _, name = path.partition(":")
    try:
        loaded: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing the user's module may raise anything
        raise ConfigError(f"{key}: can't load {path!r}: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise ConfigError(f"{key}: {path!r} is a {type(loaded).__name__}, but should be callable")
    function: Callable[..., Any] = loaded
    return function
