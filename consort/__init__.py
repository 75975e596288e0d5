"""Language models that play together: in this process (`LLM`), or on a server (`Client`).

Names are imported on first use, so that importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consort.answers import Answer, Choice, Piece, ToolCall
    from consort.client import Client
    from consort.errors import (
        ConfigError,
        ConsortError,
        ContextLengthError,
        DeadlineError,
        InvalidRequestError,
        OverloadedError,
        UnavailableError,
        UnknownModelError,
    )
    from consort.llm import LLM
    from consort.params import SamplingParams

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

_HOMES = {
    "LLM": "llm",
    "Client": "client",
    "SamplingParams": "params",
    **dict.fromkeys(("Answer", "Choice", "Piece", "ToolCall"), "answers"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
