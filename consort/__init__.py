"""Language models that play together: in this process (`LLM`), or on a server (`Client`).

Both are imported on first use, so that importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from consort.text_model import Answer, Choice, Piece, SamplingParams, ToolCall
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

if TYPE_CHECKING:
    from consort.client import Client
    from consort.llm import LLM

__all__ = [
    "LLM",
    "Answer",
    "Choice",
    "Client",
    "ConfigError",
    "ConsortError",
    "ContextLengthError",
    "DeadlineError",
    "InvalidRequestError",
    "OverloadedError",
    "Piece",
    "SamplingParams",
    "ToolCall",
    "UnavailableError",
    "UnknownModelError",
]


def __getattr__(name: str) -> Any:
    if name in ("Client", "LLM"):
        return getattr(import_module(f"{__name__}.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
