"""Content blocks of /v1/messages and their events. Writes no events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from deployments.tokenizers.tool_format import CallStart

Event = tuple[str, dict[str, Any]]  # type, other fields


class ContentBlock(ABC):
    """A content block while it is generated."""

    delta: str  # its type
    delta_field: str

    def __init__(self, index: int) -> None:
        """index: of the block in the message."""
        self._index = index
        self._texts: list[str] = []

    def begin(self) -> Sequence[Event]:
        return [("content_block_start", {"index": self._index, "content_block": self._empty()})]

    def add(self, text: str) -> Sequence[Event]:
        self._texts.append(text)
        return [self._delta({"type": self.delta, self.delta_field: text})]

    def end(self) -> Sequence[Event]:
        return [("content_block_stop", {"index": self._index})]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The block so far, as JSON."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """The block before its first text."""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": self._index, "delta": delta}

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class AnswerText(ContentBlock):
    """A text."""

    delta, delta_field = "text_delta", "text"

    def document(self) -> dict[str, Any]:
        return {"type": "text", "text": self._text, "citations": None}

    def _empty(self) -> dict[str, Any]:
        return {"type": "text", "text": "", "citations": None}


class AnswerThinking(ContentBlock):
    """What the model writes before its answer. Its signature is empty: earlier thinking is taken as it comes."""

    delta, delta_field = "thinking_delta", "thinking"

    def end(self) -> Sequence[Event]:
        return [self._delta({"type": "signature_delta", "signature": ""}), *super().end()]

    def document(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self._text, "signature": ""}

    def _empty(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}


class AnswerCall(ContentBlock):
    """A call of a tool. In a whole answer, arguments that are no object, or were cut off, become an empty one."""

    delta, delta_field = "input_json_delta", "partial_json"

    def __init__(self, index: int, start: CallStart) -> None:
        super().__init__(index)
        self._start = start

    def document(self) -> dict[str, Any]:
        try:
            given = json.loads(self._text)
        except (ValueError, RecursionError):
            given = {}
        return {**self._empty(), "input": given if isinstance(given, dict) else {}}

    def _empty(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._start.id, "name": self._start.name, "input": {}}
