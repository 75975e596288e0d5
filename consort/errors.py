"""The errors that callers may meet. `InvalidRequestError.field` names what to change."""

from decoding.errors import (
    ConfigError,
    ConsortError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)

__all__ = [
    "ConfigError",
    "ConsortError",
    "ContextLengthError",
    "DeadlineError",
    "InvalidRequestError",
    "OverloadedError",
    "UnavailableError",
    "UnknownModelError",
]
