"""Body of POST /v1/responses, OpenAI's newer API, as far as it needs no stored state. Knows no models."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from decoding.sampling.params import Structure
from deployments.requests.fields import Items, JsonObject, Limit, only, without_effect
from deployments.requests.generation_request import GenerationRequest
from deployments.requests.message import Message
from deployments.requests.responses.input_items import InputItem, conversation
from deployments.requests.structure_fields import ResponseFormat
from deployments.requests.thinking import thinking_variables
from deployments.requests.tool_fields import FlatToolFields
from deployments.validation.strict import StrictModel, Text, wrong_field

_NO_STATE = "nothing is stored; send the whole conversation"


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


class ResponsesRequest(GenerationRequest, FlatToolFields):
    """POST /v1/responses."""

    prompt_field = "input"
    default_max_tokens = None

    input: Annotated[Items[InputItem], Field(min_length=1), BeforeValidator(_as_items)] = Field(
        description="A text, or messages, `reasoning`, `function_call`s and `function_call_output`s, oldest first."
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
    previous_response_id: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    conversation: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    background: Annotated[bool, only(False, why=_NO_STATE)] | None = Field(None, description="Only false.")
    prompt: Annotated[Any, only(why=_NO_STATE)] = Field(None, description="Only null.")
    max_tool_calls: int | None = Field(None, description="Changes nothing: only tools of a server are counted.")
    reasoning: ReasoningOptions | None = Field(None, description="`effort`: what `reasoning_effort` is in chat.")
    truncation: Annotated[Any, without_effect("disabled")] = Field(
        None, description="Without effect: an input that is too long is an error."
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
            *self.tool_conditions(),
        ]

    @property
    def messages(self) -> list[Message]:
        """The input as chat messages."""
        return conversation(self.input, self.instructions)

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
    def structure(self) -> Structure | None:
        return self.forced_structure() or self._text_structure

    @property
    def structure_field(self) -> str:
        own = "text.format" if self.text is not None and self.text.format is not None else super().structure_field
        return "tools" if self.must_call else own

    @property
    def _text_structure(self) -> Structure | None:
        wanted = self.text.format if self.text else None
        return wanted.response_format.structure if wanted is not None else super().structure
