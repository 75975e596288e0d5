"""Language models that play together: in this process (`LLM`), or on a server (`Client`).

Names are imported on first use, so that importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consort.client import Client
    from consort.llm import LLM
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
    "LLM": f"{__name__}.llm",
    "Client": f"{__name__}.client",
    **dict.fromkeys(("Answer", "Choice", "Piece", "SamplingParams", "ToolCall"), f"{__name__}.text_model"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    from decoding import errors

    return getattr(errors, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
