"""Input items of /v1/responses: messages, reasoning, function calls and their outputs. Knows no chat templates."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from deployments.requests.fields import Items, without_effect
from deployments.requests.message import Message, refusal_as_text
from deployments.validation.strict import StrictModel, Text, wrong_field

ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]

_FIELDS: dict[ItemType, set[str]] = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content"},
}


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    return [refusal_as_text(part, "output_text") for part in value] if isinstance(value, list) else value


def _without_nulls(value: object) -> object:
    """Drop null fields, which clients send when they return an earlier output."""
    return {name: field for name, field in value.items() if field is not None} if isinstance(value, dict) else value


class ItemPart(StrictModel):
    """A text part of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: Text
    annotations: Annotated[Any, without_effect([])] = None
    logprobs: list[Any] | None = None  # of an earlier output; ignored


Parts = Annotated[Items[ItemPart], BeforeValidator(_as_parts)]


class Item(StrictModel):
    """An input item, which may be an earlier output item. Its type determines its fields."""

    type: ItemType = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = Field(None, description="Of a message: a text, or text parts.")
    call_id: Text | None = None
    name: Text | None = Field(None, description="Of the function that was called.")
    arguments: Text | None = Field(None, description="JSON.")
    output: Parts | None = Field(None, description="What the function returned: a text, or text parts.")
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    summary: list[Any] | None = None  # of an earlier output; ignored

    @model_validator(mode="after")
    def _fits_its_type(self) -> "Item":
        wanted = _FIELDS[self.type]
        for field in ("role", "content", "call_id", "name", "arguments", "output"):
            given = getattr(self, field) is not None
            if given and field not in wanted:
                raise wrong_field(field, f"has no place in the type {self.type!r}")
            if not given and field in wanted and self.type != "reasoning":  # which may be empty
                raise wrong_field(field, "is required")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The item as a message of a chat."""
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        return {"role": self.role, "content": _text(self.content)}


InputItem = Annotated[Item, BeforeValidator(_without_nulls)]


def conversation(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """Convert items to chat messages. Calls and reasoning join the assistant's turn; instructions come first."""
    turns: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    reasoning = ""
    for item in items:
        if item.type == "reasoning":
            reasoning += _text(item.content)
            continue
        if item.type == "function_call" and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(item.turn["tool_calls"])
        else:
            turns.append(item.turn)
            if reasoning and turns[-1]["role"] == "assistant":
                turns[-1]["reasoning_content"] = reasoning
            reasoning = ""
    return [Message.model_validate(turn) for turn in turns]


def _text(parts: Sequence[ItemPart] | None) -> str:
    return "".join(part.text for part in parts or ())
