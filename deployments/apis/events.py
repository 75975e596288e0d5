"""What an answer consists of, as it is read from the model's text: text, reasoning, calls of tools, and its end."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model writes before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call. Its arguments follow."""

    name: str
    # Mistral requires nine letters and digits.
    id: str = field(default_factory=lambda: f"call{secrets.token_hex(3)[:5]}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the latest call's JSON arguments, as the model wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer, and why it ended: `calls` means that the model stopped after calls."""

    reason: Literal["stop", "length", "calls"]


Event = Text | Reasoning | Call | Arguments | End


class AnswerParser(ABC):
    """Parser of one answer. Its events don't depend on how the text is split, except for where pieces end."""

    @abstractmethod
    def add(self, text: str, *, last: bool) -> Sequence[Event]:
        """Add text; return the new events. last: no more text follows."""


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that is a beginning of the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
