"""Messages of a conversation, tools that the model may call, and switches of models that reason."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from decoding.sampling.params import Structure
from deployments.fields.strict import ContentPart, IgnoredFields, StrictModel, Text, wrong_field
from deployments.fields.structures import structure_of
from deployments.fields.types import Items, JsonObject

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}  # what a function without `parameters` takes
# What else in a schema may name properties.
_OTHER_PROPERTIES = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
}
_Function = TypeVar("_Function")
Offered = Annotated[Items[_Function], Field(max_length=128)]
_OFFERED = "Functions that the model may call."
_CHOICE = "`auto`, `none`, `required`, one function, which must be called then, or the `allowed_tools`."


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(StrictModel):
    """A function that the model may call, and the schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None  # a JSON schema
    strict: bool | None = None  # forced calls always follow the schema


class Tool(StrictModel):
    """A tool of a chat. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FlatTool(FunctionDefinition):
    """A tool in the format of responses."""

    type: Literal["function"]

    @property
    def definition(self) -> FunctionDefinition:
        return FunctionDefinition(**self.model_dump(exclude={"type"}))


class CalledFunction(StrictModel):
    """A called function. Its arguments are JSON in a string."""

    name: Text
    arguments: Text


class PastCall(StrictModel):
    """A tool call in an earlier turn of the assistant, as it was returned to the client."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's chunk; ignored

    @property
    def turn(self) -> dict[str, Any]:
        """The call as chat templates take it, with the arguments parsed if they are JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call a function."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None  # of the function that must be called
    parallel: bool = True  # false: at most one call, where calls are required
    allowed: tuple[str, ...] | None = None  # names of the functions to choose among; None: all

    @property
    def flat(self) -> str | dict[str, Any]:
        """`tool_choice` in the format of responses."""
        if self.allowed is not None:
            tools = [{"type": "function", "name": name} for name in self.allowed]
            return {"type": "allowed_tools", "mode": self.mode, "tools": tools}
        return self.mode if self.name is None else {"type": "function", "name": self.name}


def _choice_reader(form: str, name_of: Callable[[Any], object]) -> PlainValidator:
    """Validator of `tool_choice`. form: how it names a function, for the error; name_of: reads the name."""
    forms = f'should be "none", "auto", "required" or {form}'

    def read(value: Any) -> ToolChoice | None:
        if value is None or value in ("none", "auto", "required"):
            return value and ToolChoice(value)
        if (allowed := _allowed_tools(value)) is not None:
            mode, tools = allowed
            names = [name_of(tool) for tool in tools]
            if names and mode in ("auto", "required") and all(isinstance(name, str) for name in names):
                return ToolChoice(mode, allowed=tuple(map(str, names)))
        name = name_of(value)
        if not isinstance(name, str):
            raise PydanticCustomError("tool_choice", "{forms}", {"forms": forms})
        return ToolChoice("named", name)

    return PlainValidator(read, json_schema_input_type=Any)


def _allowed_tools(value: Any) -> tuple[Any, list[Any]] | None:
    """Return the mode and the tools of a choice among some, in the format of chat or of responses; None: it is none."""
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            return mode, tools
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            return mode, tools
    return None


def _nested_name(value: Any) -> object:
    match value:
        case {"type": "function", "function": {"name": name}}:
            return name
    return None


def _flat_name(value: Any) -> object:
    match value:
        case {"type": "function", "name": name}:
            return name
    return None


def functions_only(definition: str, kind: str = "function") -> BeforeValidator:
    """Validator that leaves out tools of other kinds, such as searches that a provider's server runs.

    They are an error in a strict request. definition: the field by which a tool is known as a function.
    """

    def is_function(tool: object) -> bool:
        return not isinstance(tool, dict) or tool.get("type") in (None, kind) or definition in tool

    def read(value: object, info: ValidationInfo) -> object:
        if not isinstance(value, list) or not isinstance(info.context, IgnoredFields):
            return value
        for tool in value:
            if not is_function(tool):
                info.context.note(f"tools.{tool['type']}")
        return [tool for tool in value if is_function(tool)]

    return BeforeValidator(read)


class ToolUse(StrictModel):
    """Tool fields that chat and responses share."""

    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call, where calls are `required`.")

    @property
    def given_functions(self) -> Sequence[FunctionDefinition]:
        raise NotImplementedError

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the model may call; none if `tool_choice` is `none`."""
        return [Tool(type="function", function=function) for function in self._allowed_functions]

    @property
    def _allowed_functions(self) -> Sequence[FunctionDefinition]:
        if self.tool_choice == ToolChoice("none"):
            return ()
        allowed = None if self.tool_choice is None else self.tool_choice.allowed
        return [function for function in self.given_functions if allowed is None or function.name in allowed]

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.mode in ("required", "named")

    def tool_conditions(self) -> list[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        names = [function.name for function in self.given_functions]
        choice = self.tool_choice or ToolChoice("auto")
        wanted = [*(choice.allowed or ()), *([] if choice.name is None else [choice.name])]
        missing = next((name for name in wanted if name not in names), None)
        return [
            (not self.must_call or bool(names), "tool_choice", "needs tools"),
            (missing is None, "tool_choice", f"is {missing!r}, which is not among the tools"),
            (len(names) == len(set(names)), "tools", "should have names of their own"),
        ]

    def forced_structure(self) -> Structure | None:
        """Structure of a forced call: the arguments of the named function, or a list of calls; None: not forced."""
        if self.tool_choice is None or not self.must_call:
            return None
        schemas = {
            function.name: _arguments(function.parameters or _NO_ARGUMENTS) for function in self._allowed_functions
        }
        if self.tool_choice.name is not None and self.tool_choice.name in schemas:
            return _compact(schemas[self.tool_choice.name])
        names = [_identifier(schema) for schema in schemas.values()]
        bases = [
            name if ":" in name and names.count(name) == 1 else f"tool:/{number}/{quote(name)}"
            for number, name in enumerate(names)
        ]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": function}, "arguments": _document(schema, base)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for (function, schema), base in zip(schemas.items(), bases, strict=True)
        ]
        bound = {} if any(map(_takes_any, schemas.values())) else {"maxItems": len(calls)}
        if self.parallel_tool_calls is False or not self.tool_choice.parallel:
            bound = {"maxItems": 1}
        return _compact({"type": "array", "minItems": 1, "items": {"anyOf": calls}, **bound})


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments, with no other properties than it names unless it speaks of them.

    Small models go on with properties of their own until they have spent all their tokens.
    """
    is_open = "properties" not in schema or not _OTHER_PROPERTIES.isdisjoint(schema)
    return schema if is_open else schema | {"additionalProperties": False}


def _takes_any(arguments: dict[str, Any]) -> bool:
    """Whether calls can differ in their arguments. Small models repeat those that can't until no tokens are left."""
    return bool(arguments.get("properties")) or arguments.get("additionalProperties") is not False


def _compact(schema: dict[str, Any]) -> Structure:
    """Return the structure of JSON without blanks, on which small models may spend all their tokens."""
    return structure_of(schema | {"x-guidance": {"whitespace_flexible": False}})


def _identifier(schema: dict[str, Any]) -> str:
    """Return the URI that a schema gives itself, without a fragment; "": none. Draft 4 has `id`."""
    return next((name.partition("#")[0] for key in ("$id", "id") if isinstance(name := schema.get(key), str)), "")


def _document(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """Return a schema that can be a part of another, because its references are resolved against a base URI."""
    document = {"$id": base, "id": base} | {key: value for key, value in schema.items() if key not in ("$id", "id")}
    if "$ref" in document:  # drafts up to 7 ignore an identifier beside a reference
        parts = document.get("allOf", [])
        document["allOf"] = [*(parts if isinstance(parts, list) else [parts]), {"$ref": document.pop("$ref")}]
    return document


class ToolFields(ToolUse):
    """Tool fields of chat."""

    tools: Annotated[Offered[Tool], functions_only("function")] | None = Field(None, description=_OFFERED)
    tool_choice: Annotated[
        ToolChoice | None, _choice_reader('{"type": "function", "function": {"name": …}}', _nested_name)
    ] = Field(None, description=_CHOICE)

    @property
    def given_functions(self) -> Sequence[FunctionDefinition]:
        return [tool.function for tool in self.tools or ()]


class FlatToolFields(ToolUse):
    """Tool fields of responses."""

    tools: Annotated[Offered[FlatTool], functions_only("parameters")] | None = Field(None, description=_OFFERED)
    tool_choice: Annotated[ToolChoice | None, _choice_reader('{"type": "function", "name": …}', _flat_name)] = Field(
        None, description=_CHOICE
    )

    @property
    def given_functions(self) -> Sequence[FunctionDefinition]:
        return [tool.definition for tool in self.tools or ()]


def _as_text_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [refusal_as_text(part, "text") for part in value] if isinstance(value, list) else value


def refusal_as_text(part: object, text_type: str) -> object:
    """Return a text part in place of a refusal of an earlier turn, which is all that the assistant said then."""
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": text_type, "text": text}
    return part


class TextPart(ContentPart):
    """A text part of a message."""

    type: Literal["text"]
    text: Text


TextParts = Annotated[Items[TextPart], BeforeValidator(_as_text_parts)]


class Message(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextParts | None = Field(None, description="A text, or text parts.")
    reasoning_content: Text | None = Field(None, description="What the assistant wrote before its content.")
    name: Text | None = Field(None, description="Of the speaker, for chat templates that show it.")
    tool_calls: Items[PastCall] | None = Field(None, description="What the assistant called.")
    tool_call_id: Text | None = Field(None, description="Which call the content of a tool answers.")

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):  # answers and results may be empty
            raise wrong_field("content", "is required")
        if self.tool_calls and self.role != "assistant":
            raise wrong_field("tool_calls", f"has no place in the role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong_field("tool_call_id", "is required: the id of the call that this answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise wrong_field("tool_call_id", f"has no place in the role {self.role!r}")
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


class Document(StrictModel):
    """A text that an answer should rest on."""

    title: Text | None = None
    text: Text


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template makes a prompt of."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    add_generation_prompt: bool = True  # begin the assistant's turn
    continue_final_message: bool = False
    tools: Sequence[Tool] = ()
    documents: Sequence[Document] = ()
    written: Sequence[tuple[Sequence[int], Sequence[int]]] = ()  # of earlier answers: tokens before, their own


def thinking_variables(effort: str | None, enabled: bool | None) -> Mapping[str, Any]:
    """Variables for the chat template, under the names that templates have.

    effort: how much to think; `none`: not at all; None: not said.
    enabled: whether to think; None: as the effort says.
    """
    thinks = enabled if enabled is not None or effort is None else effort != "none"
    # Qwen 3 and GLM, DeepSeek and Granite, GPT-OSS.
    variables = {
        "enable_thinking": thinks,
        "thinking": thinks,
        "reasoning_effort": None if effort == "none" else effort,
    }
    return {name: value for name, value in variables.items() if value is not None}
