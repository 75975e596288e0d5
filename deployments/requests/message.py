"""A message of a conversation. Knows nothing of chat templates."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from deployments.requests.fields import Items
from deployments.requests.tool_fields import PastCall
from deployments.validation.strict import StrictModel, Text, wrong_field


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [refusal_as_text(part, "text") for part in value] if isinstance(value, list) else value


def refusal_as_text(part: object, text_type: str) -> object:
    """Return a text part in place of a refusal of an earlier turn, which is all that the assistant said then."""
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": text_type, "text": text}
    return part


class TextPart(StrictModel):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


class Message(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Items[TextPart] | None, BeforeValidator(_as_parts)] = Field(
        None, description="A text, or text parts."
    )
    reasoning_content: Text | None = Field(None, description="What the assistant wrote before its content.")
    name: Text | None = Field(None, description="Of the speaker, for chat templates that show it.")
    tool_calls: Items[PastCall] | None = Field(None, description="What the assistant called.")
    tool_call_id: Text | None = Field(None, description="Which call the content of a tool answers.")

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.content is None and self.role != "assistant":  # an answer may have been empty
            raise wrong_field("content", "is required")
        if self.tool_calls and self.role != "assistant":
            raise wrong_field("tool_calls", f"has no place in the role {self.role!r}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise wrong_field("tool_call_id", "goes with the role tool, and with no other")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        more: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content if self.role == "assistant" else None,
        }
        if self.tool_calls:
            more["tool_calls"] = [call.turn for call in self.tool_calls]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.text} | {name: value for name, value in more.items() if value is not None}
