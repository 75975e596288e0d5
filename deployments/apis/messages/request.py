"""Bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from decoding.sampling.params import Structure
from deployments.fields.conversation import (
    Conversation,
    FunctionDefinition,
    FunctionName,
    Message,
    Offered,
    ToolChoice,
    ToolUse,
    functions_only,
    thinking_variables,
)
from deployments.fields.generation import ConversationRequest
from deployments.fields.strict import ContentPart, StrictModel, Text, wrong_field
from deployments.fields.structures import structure_of
from deployments.fields.types import EndpointName, Items, JsonObject, StopStrings, without_effect

BlockType = Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]

_BLOCK_FIELDS: dict[BlockType, set[str]] = {
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
_CHOICES = 'should be {"type": "auto"}, "any", "none" or {"type": "tool", "name": …}'


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(ContentPart):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None  # prefixes are not kept by name
    citations: list[Any] | None = None


Texts = Annotated[Items[TextBlock], BeforeValidator(_as_blocks)]


class Block(ContentPart):
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
        for field in sorted(_BLOCK_FIELDS[self.type]):
            if getattr(self, field) is None:
                raise wrong_field(field, "is required")
        return self


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
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in self.content
            if block.type == "tool_use"
        ]
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


class AnthropicTool(StrictModel):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    cache_control: Any = None


def _read_choice(value: object) -> ToolChoice | None:
    match value:
        case None:
            return None
        case {"type": "tool", "name": str(name)}:
            choice = ToolChoice("named", name)
        case {"type": "auto" | "any" | "none" as kind}:
            choice = ToolChoice("required" if kind == "any" else kind)
        case _:
            raise PydanticCustomError("tool_choice", _CHOICES)
    single = isinstance(value, dict) and value.get("disable_parallel_tool_use") is True
    return replace(choice, parallel=False) if single else choice


class Thinking(StrictModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Any, without_effect()] = None
    display: Any = None


class OutputFormat(StrictModel):
    """Structure of the answer."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(StrictModel):
    """How much the model thinks, and the structure of its answer."""

    effort: Text | None = None
    format: OutputFormat | None = None


class AnthropicConversation(ToolUse):
    """Fields that messages and the count of their tokens share."""

    messages: Annotated[Items[AnthropicMessage], Field(min_length=1)] = Field(
        description="The conversation so far: texts, or blocks `text`, `thinking`, `tool_use` and `tool_result`."
    )
    system: Texts | None = Field(None, description="What the model is told before the conversation.")
    tools: Annotated[Offered[AnthropicTool], functions_only("input_schema", "custom")] | None = Field(
        None, description="Functions that the model may call: `name`, `description`, `input_schema`."
    )
    tool_choice: Annotated[ToolChoice | None, PlainValidator(_read_choice, json_schema_input_type=Any)] = Field(
        None, description="`type`: `auto`, `any`, `none`, or `tool` with a `name`; `disable_parallel_tool_use`."
    )
    thinking: Thinking | None = Field(
        None, description="`type`: `enabled`, `adaptive` or `disabled`, for chat templates that have such a switch."
    )
    output_config: OutputConfig | None = Field(
        None, description="`effort`: what `reasoning_effort` is in chat; `format`: a `json_schema`."
    )

    @property
    def given_functions(self) -> Sequence[FunctionDefinition]:
        return [
            FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or ()
        ]

    def to_conversation(self) -> Conversation:
        """Return the conversation as chat has it. The system's text comes first."""
        turns = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        turns += [turn for message in self.messages for turn in message.turns]
        messages = [Message.model_validate(turn) for turn in turns]
        return Conversation(messages, self.switches, not self.continues, self.continues, self.offered_tools)

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        return self.messages[-1].role == "assistant"

    @property
    def switches(self) -> Mapping[str, Any]:
        enabled = None if self.thinking is None else self.thinking.type != "disabled"
        return thinking_variables(self.output_config.effort if self.output_config else None, enabled)


class MessagesRequest(AnthropicConversation, ConversationRequest):
    """POST /v1/messages."""

    prompt_field = "messages"
    default_max_tokens = None

    stop: StopStrings | None = Field(
        None,
        alias="stop_sequences",
        description="The answer ends right before any of these. `stop` is read where this is missing.",
    )
    return_token_details: Annotated[bool | None, without_effect(False)] = Field(
        None, description="Without effect: messages have no details of tokens."
    )

    @model_validator(mode="before")
    @classmethod
    def _stop_by_its_other_name(cls, data: object) -> object:
        """Read `stop`, which clients of OpenAI's API send, as `stop_sequences`."""
        if not isinstance(data, dict) or "stop" not in data or data.get("stop_sequences") is not None:
            return data
        others = {name: value for name, value in data.items() if name != "stop"}
        return {**others, "stop_sequences": data["stop"]}

    def _conditions(self) -> list[tuple[bool, str, str]]:
        return [
            *super()._conditions(),
            (self.choices == 1, "n", "should be 1; a message is one answer"),
            (self.prompt_logprobs is None, "prompt_logprobs", "is not part of messages; use completions or chat"),
            (
                self.own_structure is None or self.shared_structure is None,
                "output_config",
                "has no place beside response_format or structured_outputs; set one of them",
            ),
            (
                not self.continues or not self.must_call,
                "messages",
                "should end with the user's, where a call is forced",
            ),
        ]

    @property
    def switch_field(self) -> str:
        return "output_config" if self.thinking is None else "thinking"

    @property
    def limit_is_upper_bound(self) -> bool:
        return True  # clients ask for as much as their own models have

    @property
    def logprob_count(self) -> int | None:
        return None

    @property
    def own_structure(self) -> tuple[str, Structure | None] | None:
        wanted = None if self.output_config is None else self.output_config.format
        return None if wanted is None else ("output_config", structure_of(wanted.schema_))


class CountTokensRequest(AnthropicConversation):
    """POST /v1/messages/count_tokens."""

    model: EndpointName = ""


class TokenCount(BaseModel):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int
