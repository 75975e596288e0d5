"""Writes answers to /v1/messages, as Anthropic's messages and their events."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from deployments.apis.errors import error_event, typed_sse
from deployments.apis.events import Arguments, Call, Reasoning, Text
from deployments.apis.items import Item, ItemEvent, ItemWriter, Status
from deployments.apis.messages.request import MessagesRequest
from deployments.apis.parts import Part


class MessagesWriter(ItemWriter):
    """Writes the deltas of one request as texts, thinking and calls of tools."""

    _body: MessagesRequest

    def begin(self) -> str:
        return self._write([("message_start", {"message": self._message(None)})])

    def end(self) -> str:
        whole = self.whole()
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        extras = {name: whole[name] for name in ("speculation", "seed")}
        return self._write(
            [("message_delta", {"delta": delta, "usage": whole["usage"], **extras}), ("message_stop", {})]
        )

    def fail(self, error: Exception) -> str:
        return error_event(error, "messages")

    def whole(self) -> dict[str, Any]:
        return {**self._message(self._stop_reason()), **self._extras()}

    def _item(self, event: Text | Reasoning | Call) -> Item:
        index = len(self._items)
        match event:
            case Text():
                return _Text(index)
            case Reasoning():
                return _Thinking(index)
            case Call():
                return _ToolUse(index, event)

    def _write(self, events: Sequence[ItemEvent]) -> str:
        return "".join(typed_sse({"type": kind, **fields}) for kind, fields in events)

    def _stop_reason(self) -> str:
        if self._choice.finish == "length":
            return "max_tokens"
        if any(isinstance(item, _ToolUse) for item in self._items):
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    @property
    def _stop_sequence(self) -> str | None:
        reason = self._choice.whole().stop_reason
        return reason if isinstance(reason, str) and reason in (self._body.stop or ()) else None

    def _message(self, stop_reason: str | None) -> dict[str, Any]:
        statistics = self._choice.statistics
        return {
            "id": f"msg_{self._identity.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [item.document() for item in self._items],
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence if stop_reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": self._prompt_tokens - statistics.cached,
                "output_tokens": statistics.committed,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": statistics.cached,
            },
        }


class _Block(Item):
    delta: ClassVar[str]  # the type of its deltas
    delta_field: ClassVar[str]

    def begin(self) -> Sequence[ItemEvent]:
        return [("content_block_start", {"index": self._index, "content_block": self.document()})]

    def add(self, part: Part) -> Sequence[ItemEvent]:
        self._texts.append(part.text)
        return [self._delta({"type": self.delta, self.delta_field: part.text})]

    def end(self, status: Status) -> Sequence[ItemEvent]:
        return [("content_block_stop", {"index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> ItemEvent:
        return "content_block_delta", {"index": self._index, "delta": delta}


class _Text(_Block):
    content, delta, delta_field = Text, "text_delta", "text"

    def document(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class _Thinking(_Block):
    """What the model writes before its answer. Its signature is empty: earlier thinking is taken as it comes."""

    content, delta, delta_field = Reasoning, "thinking_delta", "thinking"

    def end(self, status: Status) -> Sequence[ItemEvent]:
        return [self._delta({"type": "signature_delta", "signature": ""}), *super().end(status)]

    def document(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self.text, "signature": ""}


class _ToolUse(_Block):
    """A call of a tool. In a whole answer, arguments that are no object, or were cut off, become an empty one."""

    content, delta, delta_field = Arguments, "input_json_delta", "partial_json"

    def __init__(self, index: int, call: Call) -> None:
        super().__init__(index)
        self._call = call

    def document(self) -> dict[str, Any]:
        try:
            given = json.loads(self.text)
        except (ValueError, RecursionError):
            given = {}
        arguments = given if isinstance(given, dict) else {}
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": arguments}
