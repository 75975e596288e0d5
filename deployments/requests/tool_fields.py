"""The fields of a chat that are about tools: what the model may call, whether it must, and what it called before."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from decoding.params import Structure
from deployments.configuration.strict import StrictModel, Text

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_CHOICE_FORMS = 'should be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'


class FunctionDefinition(StrictModel):
    """What can be called, and with what."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # forced calls always follow the schema

    @property
    def schema_or_any(self) -> dict[str, Any]:
        return self.parameters or _ANY_OBJECT


class Tool(StrictModel):
    """The only kind of tool that there is: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(StrictModel):
    """A function with its arguments, which are JSON in a text."""

    name: Text
    arguments: Text


class PastCall(StrictModel):
    """A call in an earlier turn of the assistant, as it was answered."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a stream's chunk, of no use here

    @property
    def turn(self) -> dict[str, Any]:
        """As chat templates take it: with the arguments as an object where they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, or has to, call something."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None  # the one that has to be called

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


def _read_choice(value: Any) -> ToolChoice | None:
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            return ToolChoice("named", name)
    raise PydanticCustomError("tool_choice", "{forms}", {"forms": _CHOICE_FORMS})


class ToolFields(StrictModel):
    """Of chat."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(
        None, description="Functions that the model may call; needs a model whose chat template has tools."
    )
    tool_choice: Annotated[ToolChoice | None, PlainValidator(_read_choice, json_schema_input_type=Any)] = Field(
        None, description="`auto`, `none`, `required`, or one function, which must be called then."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call, where calls are `required`.")

    @property
    def offered_tools(self) -> list[Tool]:
        """What the model may call."""
        return [] if self.tool_choice == ToolChoice("none") else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice is not None and self.tool_choice.forced

    def tool_conditions(self) -> list[tuple[bool, str, str]]:
        """Whether it holds, and else which field is wrong and why."""
        names = [tool.function.name for tool in self.tools or ()]
        wanted = None if self.tool_choice is None else self.tool_choice.name
        return [
            (not self.must_call or bool(names), "tool_choice", "needs tools"),
            (wanted is None or wanted in names, "tool_choice", f"is {wanted!r}, which is not among the tools"),
            (len(names) == len(set(names)), "tools", "should have names of their own"),
        ]

    def forced_structure(self) -> Structure | None:
        """What an answer that has to be a call keeps to: the arguments of the named function, or a list of calls."""
        if self.tool_choice is None or not self.must_call:
            return None
        functions = {tool.function.name: tool.function for tool in self.tools or ()}
        if self.tool_choice.name is not None and self.tool_choice.name in functions:
            return Structure(kind="json", definition=json.dumps(functions[self.tool_choice.name].schema_or_any))
        calls = [_call_schema(function) for function in functions.values()]
        most = {"maxItems": 1} if self.parallel_tool_calls is False else {}
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
        return Structure(kind="json", definition=json.dumps(schema))


def _call_schema(function: FunctionDefinition) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": function.schema_or_any},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
