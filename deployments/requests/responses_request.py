"""What clients may send to /v1/responses: OpenAI's newer API, of which we serve what needs no state."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from decoding.params import Structure
from deployments.configuration.strict import StrictModel, Text, wrong_field
from deployments.requests.fields import Limit, only
from deployments.requests.schema import GenerationRequest, Message
from deployments.requests.structure_fields import ResponseFormat

_NO_STATE = "nothing is stored; send the whole conversation"
_NO_TOOLS = "calls of tools are not supported"


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class ItemPart(StrictModel):
    """A piece of an item: of the input, or of an earlier output that is sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[list[Any], only([], why="they are not supported")] | None = None
    logprobs: list[Any] | None = None  # of an earlier output, of no use here


class InputItem(StrictModel):
    """A message, also one of an earlier output."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ItemPart], BeforeValidator(_as_parts)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def message(self) -> Message:
        """The same as chat has it."""
        parts = [{"type": "text", "text": part.text} for part in self.content]
        return Message.model_validate({"role": self.role, "content": parts})


class TextFormat(StrictModel):
    """`response_format` in the shape of this API."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_needed(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong_field("schema", "goes with the type json_schema, and with no other")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        """The same as chat has it."""
        schema = None if self.schema_ is None else {"schema": self.schema_}
        return ResponseFormat.model_validate({"type": self.type, "json_schema": schema})


class TextOptions(StrictModel):
    """Options of the output's text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium", why="it is not supported")] = None


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    prompt_field = "input"
    default_max_tokens = None

    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_as_items)] = Field(
        description="A text, or messages, oldest first."
    )
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Limit | None = Field(None, description="Most tokens to answer with.")
    text: TextOptions | None = Field(None, description="`format`: what `response_format` is in chat.")
    include: list[Literal["message.output_text.logprobs"]] | None = Field(
        None, description="`message.output_text.logprobs`: log-probabilities of the output."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Of so many most probable tokens in each place; log-probabilities are then included."
    )
    previous_response_id: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    conversation: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    background: Annotated[bool, only(False, why=_NO_STATE)] | None = Field(None, description="Only false.")
    prompt: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    tools: Annotated[list[Any], only([], why=_NO_TOOLS)] | None = Field(None, description="Only an empty list.")
    tool_choice: Annotated[Any, only("none", "auto", why=_NO_TOOLS)] = Field(
        None, description="Only `none` or `auto`, which are the same without tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="Changes nothing without tools.")
    max_tool_calls: int | None = Field(None, description="The same.")
    reasoning: Annotated[Any, only(why="a model reasons as it is used to")] = Field(None, description="Only null.")
    truncation: Annotated[str, only("disabled", why="shorten the input instead")] | None = Field(
        None, description="Only `disabled`."
    )

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

    @property
    def messages(self) -> list[Message]:
        """The conversation as chat has it."""
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [Message.model_validate(turn) for turn in first] + [item.message for item in self.input]

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.include or self.top_logprobs is not None else None

    @property
    def structure(self) -> Structure | None:
        wanted = self.text.format if self.text else None
        return wanted.response_format.structure if wanted is not None else super().structure
