"""What the output of /v1/responses is made of: messages and calls of functions, with the events that make them.

An event is its type and its fields; who numbers and writes it is not known here.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from deployments.answers.parts import Part
from deployments.tokenizers.tool_format import CallStart

Event = tuple[str, dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """One of them, as it grows."""

    id: str

    def __init__(self, index: int) -> None:
        """index: among all items."""
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.status: Status = "in_progress"

    def begin(self) -> Sequence[Event]:
        """Before anything is added."""
        return [self._whole("added")]

    def end(self, status: Status) -> Sequence[Event]:
        """Nothing is added after this."""
        self.status = status
        return [self._whole("done")]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """As it is now."""

    def _whole(self, what: str) -> Event:
        return f"response.output_item.{what}", {"output_index": self._place["output_index"], "item": self.document()}


class MessageItem(OutputItem):
    """A text."""

    def __init__(self, index: int, tell: Callable[[Part], dict[str, Any]]) -> None:
        """tell: log-probabilities and details of a part's tokens."""
        self.id = f"msg_{secrets.token_hex(24)}"
        super().__init__(index)
        self._place["content_index"] = 0
        self._tell = tell
        self._parts: list[Part] = []
        self._ended: dict[str, Any] | None = None  # the whole content

    def begin(self) -> Sequence[Event]:
        added = self._whole("added")
        self._parts.append(Part())
        return [added, ("response.content_part.added", {**self._place, "part": self._content()})]

    def add(self, part: Part) -> Sequence[Event]:
        """More text, or tokens that add none."""
        self._parts.append(part)
        told = self._tell(part)
        if not (part.text or (part.sources and "token_details" in told)):
            return []
        return [("response.output_text.delta", {**self._place, "delta": part.text, **told})]

    def end(self, status: Status) -> Sequence[Event]:
        content = self._ended = self._content()
        done = {"text": content["text"], "logprobs": content["logprobs"]}
        return [
            ("response.output_text.done", {**self._place, **done}),
            ("response.content_part.done", {**self._place, "part": content}),
            *super().end(status),
        ]

    def document(self) -> dict[str, Any]:
        content = [self._content()] if self._parts else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _content(self) -> dict[str, Any]:
        if self._ended is not None:
            return self._ended
        whole = Part.joined(self._parts)
        return {"type": "output_text", "text": whole.text, "annotations": [], **self._tell(whole)}


class CallItem(OutputItem):
    """A call of a function."""

    def __init__(self, index: int, start: CallStart) -> None:
        self.id = f"fc_{secrets.token_hex(24)}"
        super().__init__(index)
        self._start = start
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Sequence[Event]:
        """More of the arguments."""
        self._arguments.append(arguments)
        return [("response.function_call_arguments.delta", {**self._place, "delta": arguments})]

    def end(self, status: Status) -> Sequence[Event]:
        done = {"arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", {**self._place, **done}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }
