"""Messages of Anthropic's API and their content blocks, as messages of a chat. Knows no chat templates."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from deployments.requests.fields import Items, JsonObject
from deployments.requests.message import Message
from deployments.validation.strict import StrictModel, Text, wrong_field

BlockType = Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]

_FIELDS: dict[BlockType, set[str]] = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id"},
    "thinking": {"thinking"},
    "redacted_thinking": set(),
}

_ROLES: dict[str, set[BlockType]] = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
    "system": {"text"},
}


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(StrictModel):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None  # prefixes are not kept by name
    citations: list[Any] | None = None


Texts = Annotated[Items[TextBlock], BeforeValidator(_as_blocks)]


class Block(StrictModel):
    """A content block. Its type determines its fields."""

    type: BlockType
    text: Text | None = None
    id: Text | None = None
    name: Text | None = None
    input: JsonObject | None = None
    tool_use_id: Text | None = None
    content: Texts | None = None
    is_error: bool | None = None
    thinking: Text | None = None
    signature: str | None = None  # of thinking; not checked
    data: str | None = None  # of redacted thinking; not used
    cache_control: Any = None
    citations: list[Any] | None = None
    caller: Any = None  # of a tool; only the model calls

    @model_validator(mode="after")
    def _fits_its_type(self) -> "Block":
        for field in sorted(_FIELDS[self.type]):
            if getattr(self, field) is None:
                raise wrong_field(field, "is required")
        return self

    @property
    def call(self) -> dict[str, Any]:
        """A `tool_use` as chat has it."""
        return {"id": self.id, "function": {"name": self.name, "arguments": json.dumps(self.input)}}


class AnthropicMessage(StrictModel):
    """A message: a text, or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _fits_its_role(self) -> "AnthropicMessage":
        for index, block in enumerate(self.content):
            if block.type not in _ROLES[self.role]:
                raise wrong_field(f"content.{index}.type", f"has no place in the role {self.role!r}")
        return self

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The message as messages of a chat. Results of tools come first, each in a message of its own."""
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content or ())}
            for block in self.content
            if block.type == "tool_result"
        ]
        turn: dict[str, Any] = {"role": self.role, "content": text_of(self.content)}
        calls = [block.call for block in self.content if block.type == "tool_use"]
        thinking = "".join(block.thinking or "" for block in self.content)
        if calls:
            turn["tool_calls"] = calls
        if thinking:
            turn["reasoning_content"] = thinking
        only_results = results and all(block.type == "tool_result" for block in self.content)
        return results if only_results else [*results, turn]


def text_of(blocks: Sequence[Block | TextBlock]) -> str:
    """Return the texts of the blocks, joined."""
    return "".join(block.text or "" for block in blocks)


def chat_messages(messages: Sequence[AnthropicMessage], system: Sequence[TextBlock]) -> list[Message]:
    """Convert a conversation to messages of a chat. The system's text comes first."""
    first = [{"role": "system", "content": text_of(system)}] if system else []
    return [
        Message.model_validate(turn) for turn in (*first, *(turn for message in messages for turn in message.turns))
    ]
