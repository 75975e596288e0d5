"""Output items of /v1/responses (messages, reasoning, function calls) and their events. Writes no events."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from deployments.answers.parts import Part
from deployments.tokenizers.tool_format import CallStart

Event = tuple[str, dict[str, Any]]  # type, other fields
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """An output item while it is generated."""

    id: str

    def __init__(self, index: int) -> None:
        """index: of the item in the output."""
        self._ids: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.status: Status = "in_progress"

    def begin(self) -> Sequence[Event]:
        return [self._item_event("added")]

    def end(self, status: Status) -> Sequence[Event]:
        self.status = status
        return [self._item_event("done")]

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The item so far, as JSON."""

    def _item_event(self, kind: str) -> Event:
        return f"response.output_item.{kind}", {"output_index": self._ids["output_index"], "item": self.document()}


class MessageItem(OutputItem):
    """A text message."""

    def __init__(self, index: int, token_fields: Callable[[Part], dict[str, Any]]) -> None:
        """token_fields: function that gives the fields about a part's tokens, such as `logprobs`."""
        self.id = f"msg_{secrets.token_hex(24)}"
        super().__init__(index)
        self._ids["content_index"] = 0
        self._token_fields = token_fields
        self._parts: list[Part] = []
        self._final_content: dict[str, Any] | None = None

    def begin(self) -> Sequence[Event]:
        added = self._item_event("added")
        self._parts.append(Part())
        return [added, ("response.content_part.added", {**self._ids, "part": self._content()})]

    def add(self, part: Part) -> Sequence[Event]:
        """Add text, or tokens without text; return the events."""
        self._parts.append(part)
        fields = self._token_fields(part)
        if not (part.text or (part.sources and "token_details" in fields)):
            return []
        return [("response.output_text.delta", {**self._ids, "delta": part.text, **fields})]

    def end(self, status: Status) -> Sequence[Event]:
        content = self._final_content = self._content()
        done = {"text": content["text"], "logprobs": content["logprobs"]}
        return [
            ("response.output_text.done", {**self._ids, **done}),
            ("response.content_part.done", {**self._ids, "part": content}),
            *super().end(status),
        ]

    def document(self) -> dict[str, Any]:
        content = [self._content()] if self._parts else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _content(self) -> dict[str, Any]:
        if self._final_content is not None:
            return self._final_content
        whole = Part.joined(self._parts)
        return {"type": "output_text", "text": whole.text, "annotations": [], **self._token_fields(whole)}


class ReasoningItem(OutputItem):
    """What the model writes before its answer."""

    def __init__(self, index: int) -> None:
        self.id = f"rs_{secrets.token_hex(24)}"
        super().__init__(index)
        self._ids["content_index"] = 0
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> Sequence[Event]:
        self._texts.append(text)
        return [("response.reasoning_text.delta", {**self._ids, "delta": text})]

    def end(self, status: Status) -> Sequence[Event]:
        return [("response.reasoning_text.done", {**self._ids, "text": self.text}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


class CallItem(OutputItem):
    """A function call."""

    def __init__(self, index: int, start: CallStart) -> None:
        self.id = f"fc_{secrets.token_hex(24)}"
        super().__init__(index)
        self._start = start
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Sequence[Event]:
        self._arguments.append(arguments)
        return [("response.function_call_arguments.delta", {**self._ids, "delta": arguments})]

    def end(self, status: Status) -> Sequence[Event]:
        done = {"arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", {**self._ids, **done}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._arguments),
        }
