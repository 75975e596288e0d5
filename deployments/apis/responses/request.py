"""Body of POST /v1/responses, OpenAI's newer API."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from decoding.sampling.params import Structure
from deployments.fields.conversation import Conversation, FlatToolFields, Message, refusal_as_text, thinking_variables
from deployments.fields.generation import ConversationRequest
from deployments.fields.strict import ContentPart, IgnoredFields, StrictModel, Text, without_nulls, wrong_field
from deployments.fields.structures import ResponseFormat
from deployments.fields.types import Items, JsonObject, Limit, only, without_effect
from deployments.storage.store import Turn

ItemType = Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"]

_FIELDS: dict[ItemType, set[str]] = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content"},
    "item_reference": {"id"},
}
_ID_PREFIXES: dict[ItemType, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "item_reference": "",  # which is replaced by its item
}


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    return [refusal_as_text(part, "output_text") for part in value] if isinstance(value, list) else value


class ItemPart(ContentPart):
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
        if self.id is None and "id" in wanted:
            raise wrong_field("id", "is required")
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

    def document(self) -> dict[str, Any]:
        """The item as GET /v1/responses/…/input_items has it, with an id."""
        item = {"status": "completed", **self.model_dump(exclude_none=True)}
        item.setdefault("id", f"{_ID_PREFIXES[self.type]}_{secrets.token_hex(24)}")
        if self.type == "reasoning":
            item.setdefault("summary", [])
        if self.role == "assistant":
            parts = [{"annotations": [], **part, "type": "output_text"} for part in item["content"]]
            return item | {"content": parts}
        return item


InputItem = Annotated[Item, BeforeValidator(without_nulls)]  # clients return earlier outputs with all their fields


def _text(parts: Sequence[ItemPart] | None) -> str:
    return "".join(part.text for part in parts or ())


def kept_item(document: dict[str, Any]) -> Item:
    """Return an item of a turn as an input item."""
    return Item.model_validate(without_nulls(document), context=IgnoredFields())


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(StrictModel):
    """`response_format` in the shape of this API."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_needed(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong_field("schema", "goes with the type json_schema, and with no other")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        """The format as chat has it."""
        schema = None if self.schema_ is None else {"schema": self.schema_}
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextOptions(StrictModel):
    """Options of the output's text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, without_effect("medium")] = None


class ReasoningOptions(StrictModel):
    """How the model reasons. Nothing summarises what it writes."""

    effort: Text | None = None
    summary: Annotated[Any, without_effect()] = None
    generate_summary: Annotated[Any, without_effect()] = None


@dataclass(slots=True)
class Memory:
    """What the server knows beside a request's body."""

    earlier: Sequence[Turn] = ()  # the conversation that the input continues, oldest turn first
    referenced: Sequence[Turn] = ()  # turns whose items the input names
    is_kept: bool = False  # whether the answer will be kept


class ResponsesRequest(FlatToolFields, ConversationRequest):
    """POST /v1/responses."""

    prompt_field = "input"
    default_max_tokens = None

    input: Annotated[Items[InputItem], Field(min_length=1), BeforeValidator(_as_items)] = Field(
        description="A text, or messages, `reasoning`, `function_call`s, `function_call_output`s and "
        "`item_reference`s to items of kept answers, oldest first."
    )
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Limit | None = Field(None, description="Most tokens to answer with.")
    text: TextOptions | None = Field(None, description="`format`: what `response_format` is in chat.")
    include: Items[Text] | None = Field(
        None, description="`message.output_text.logprobs`: log-probabilities of the output. Others are ignored."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Report this many most probable tokens per position, and include log-probabilities."
    )
    store: bool | None = Field(
        None, description="false: don't keep the answer. By default it is kept, if the server keeps any."
    )
    previous_response_id: Text | None = Field(
        None, description="A kept answer that the input continues, with all that came before."
    )
    conversation: Annotated[Any, only(why="send previous_response_id")] = Field(None, description="Only null.")
    background: Annotated[bool, only(False, why="answers are made while the client waits")] | None = Field(
        None, description="Only false."
    )
    prompt: Annotated[Any, only(why="no prompts are kept; send template")] = Field(None, description="Only null.")
    max_tool_calls: int | None = Field(None, description="Changes nothing: only tools of a server are counted.")
    reasoning: ReasoningOptions | None = Field(None, description="`effort`: what `reasoning_effort` is in chat.")
    truncation: Annotated[Any, without_effect("disabled")] = Field(
        None, description="Without effect: an input that is too long is an error."
    )

    _memory: Memory = PrivateAttr(default_factory=Memory)

    @property
    def memory(self) -> Memory:
        return self._memory

    def _conditions(self) -> list[tuple[bool, str, str]]:
        formats = [self.response_format, self.text.format if self.text else None]
        return [
            *super()._conditions(),
            (self.choices == 1, "n", "should be 1; a response has one output"),
            (self.prompt_logprobs is None, "prompt_logprobs", "is not part of responses; use completions or chat"),
            (None in formats, "response_format", "has no place beside text.format; set one of them"),
            (
                self.structured_outputs is None or formats[1] is None,
                "structured_outputs",
                "has no place beside text.format; set one of them",
            ),
            (
                None in (self.max_tokens, self.max_output_tokens),
                "max_tokens",
                "has no place beside max_output_tokens; set one of them",
            ),
        ]

    def to_conversation(self) -> Conversation:
        """Return the whole conversation as a chat.

        Calls and reasoning join the assistant's turn. Instructions come first; those of earlier turns are gone.
        """
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        reasoning = ""
        earlier, referenced = self.memory.earlier, self.memory.referenced
        kept = [kept_item(item) for turn in earlier for item in (*turn.input, *turn.output)]
        for item in [*kept, *self.input]:
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
        messages = [Message.model_validate(turn) for turn in turns]
        written = [(turn.lead, turn.tokens) for turn in (*earlier, *referenced) if turn.response["model"] == self.model]
        return Conversation(messages, self.switches, tools=self.offered_tools, written=written)

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def logprob_count(self) -> int | None:
        wanted = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs is not None
        return (self.top_logprobs or 0) if wanted else None

    @property
    def switches(self) -> Mapping[str, Any]:
        return thinking_variables(self.reasoning.effort if self.reasoning else None, None)

    @property
    def switch_field(self) -> str:
        return "reasoning"

    @property
    def own_structure(self) -> tuple[str, Structure | None] | None:
        wanted = self.text.format if self.text else None
        return None if wanted is None else ("text.format", wanted.response_format.structure)
