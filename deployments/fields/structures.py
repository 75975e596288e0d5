"""Fields of structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from decoding.sampling.params import Structure
from deployments.fields.strict import StrictModel, Text, wrong_field
from deployments.fields.types import Items, JsonObject

_ANY_OBJECT = '{"type": "object"}'
_MAX_CHARACTERS = 200_000

_OTHER_NAMES = {  # of vLLM before 0.12, SGLang and llama.cpp
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}

Definition = Annotated[Text, Field(min_length=1, max_length=_MAX_CHARACTERS)]


def with_structured_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request's fields with a structure that has the name of another server as `structured_outputs`."""
    given = [name for name in _OTHER_NAMES if fields.get(name) is not None]
    if not given:
        return {name: value for name, value in fields.items() if name not in _OTHER_NAMES}
    beside = [*given[1:], *(name for name in ("structured_outputs", "response_format") if fields.get(name) is not None)]
    if beside:
        raise wrong_field(given[0], f"has no place beside {beside[0]}; set one of them")
    others = {name: value for name, value in fields.items() if name not in _OTHER_NAMES}
    return {**others, "structured_outputs": {_OTHER_NAMES[given[0]]: fields[given[0]]}}


class JsonSchema(StrictModel):
    """A JSON schema in OpenAI's wrapping."""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None  # answers always follow the schema


def structure_of(schema: dict[str, Any]) -> Structure:
    """Structure of JSON that follows a schema."""
    return Structure(kind="json", definition=_written(schema))


def _written(value: object) -> str:
    """Write JSON without escapes, since the characters are counted."""
    return json.dumps(value, ensure_ascii=False)


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_needed(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "is required" if self.json_schema is None else f"has no place in the type {self.type!r}"
            raise wrong_field("json_schema", problem)
        return self

    @property
    def structure(self) -> Structure | None:
        """Structure for the decoder; None: free text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Structure(kind="json", definition=_ANY_OBJECT)
        return structure_of(self.json_schema.schema_)


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    always_strict = True

    json_: Definition | JsonObject | None = Field(None, alias="json")
    regex: Definition | None = None
    choice: Annotated[Items[Annotated[Text, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Definition | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [value for value in (self.json_, self.regex, self.choice, self.grammar) if value is not None]
        if len(given) != 1:
            raise wrong_field("", f"has {len(given)} of json, regex, choice and grammar; should have one")
        if isinstance(self.json_, str):
            _check_schema(self.json_)
        return self

    @property
    def structure(self) -> Structure:
        if self.regex is not None:
            return Structure(kind="regex", definition=self.regex)
        if self.choice is not None:
            return Structure(kind="choice", definition=_written(self.choice))
        if self.grammar is not None:
            return Structure(kind="grammar", definition=self.grammar)
        return Structure(kind="json", definition=self.json_ if isinstance(self.json_, str) else _written(self.json_))


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise wrong_field("json", "is nested too deeply") from error
    except ValueError as error:
        raise wrong_field("json", f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise wrong_field("json", "should be a JSON schema, which is an object")
