"""Language models that play together: in this process (`LLM`, `AsyncLLM`), or on a server (`Client`).

They are imported on first use, so that importing this package is cheap.
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
    from consort.async_llm import AsyncLLM
    from consort.client import Client
    from consort.llm import LLM

__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
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


_MODULES = {"AsyncLLM": "async_llm", "Client": "client", "LLM": "llm"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
