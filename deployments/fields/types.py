"""Types of request fields and their checks."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, PlainValidator, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from deployments.fields.strict import IgnoredFields, Text, without_surrogates

Prompt = str | list[int]

MIN_TIMEOUT_S = 0.001

_MAX_STOP_STRINGS = 16
_MAX_BAD_WORDS = 1000
_MAX_TOKEN_IDS = 32_768
_MAX_BIASES = 4096
_MAX_INT = 2**31 - 1
_TOKEN_KEY = re.compile(r"\d{1,10}")
_PROMPT_FORMS = "should be a string, a list of strings, a list of token ids, or a list of such lists"


@dataclass(frozen=True, eq=False, slots=True)
class _Only(AfterValidator):
    """Validator that also shows the accepted values in JSON schemas."""

    accepted: Sequence[object]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.accepted)} if self.accepted else {"type": "null"}


def only(*accepted: object, why: str) -> AfterValidator:
    """Validator that accepts only null and these values, which have no effect. why: the reason in the error."""
    expected = " or ".join(map(repr, accepted)) or "null"

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(harmless) and value == harmless for harmless in accepted):
            raise PydanticCustomError("only", "should be {expected}; {why}", {"expected": expected, "why": why})
        return value

    return _Only(check, accepted)


def without_effect(*accepted: object) -> BeforeValidator:
    """Validator for a field that changes nothing: any other value is ignored, or an error in a strict request."""
    expected = " or ".join(map(repr, accepted)) or "null"

    def check(value: object, info: ValidationInfo) -> object:
        if value is None or any(type(value) is type(known) and value == known for known in accepted):
            return value
        if not isinstance(info.context, IgnoredFields):
            raise PydanticCustomError(
                "only", "should be {expected}; another value has no effect", {"expected": expected}
            )
        info.context.note(info.field_name or "")
        return None

    return BeforeValidator(check, json_schema_input_type=Any)


def at_most(count: int) -> BeforeValidator:
    """Validator that refuses an object of more entries before it checks any of them."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_long", "should have at most {most} entries, not {count}", {"most": count, "count": len(value)}
            )
        return value

    return BeforeValidator(check, json_schema_input_type=Any)


def _without_surrogates_inside(value: Any) -> Any:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:  # only in a process: bodies are JSON
        raise PydanticCustomError("json", "should be JSON") from error
    without_surrogates(text)
    return value


def as_list(value: object) -> object:
    """Return a text as a list of one."""
    return [value] if isinstance(value, str) else value


def _read_prompts(value: Any) -> list[Prompt]:
    if value is None:
        return []
    prompts = value if isinstance(value, list) and value and not _is_token(value[0]) else [value]
    for prompt in prompts:
        if isinstance(prompt, str):
            without_surrogates(prompt)
        elif not (isinstance(prompt, list) and all(_is_token(token) for token in prompt)):
            raise PydanticCustomError("prompt", _PROMPT_FORMS)
        if not prompt:
            raise PydanticCustomError("empty", "should not be empty")
    return list(prompts)


def _read_token_keys(value: object) -> object:
    """Return an object with its keys, which are strings in JSON, as token ids."""
    if not isinstance(value, dict):
        return value
    wrong = next((key for key in value if not _TOKEN_KEY.fullmatch(str(key))), None)
    if wrong is not None:
        raise PydanticCustomError("token_key", "should have token ids as its keys")
    return {int(key): bias for key, bias in value.items()}


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]  # stop at the first wrong item: there may be very many

EndpointName = Annotated[
    str,
    BeforeValidator(lambda name: "" if name is None else name),
    Field(
        description="An endpoint's name, as GET /v1/models lists them. May be left out below its base URL, "
        "or if it is the only one."
    ),
]
JSON_TEXTS = AfterValidator(_without_surrogates_inside)
JsonObject = Annotated[dict[str, Any], JSON_TEXTS]
Limit = Annotated[int, Field(le=_MAX_INT)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
TokenIds = Annotated[Items[TokenId], Field(max_length=_MAX_TOKEN_IDS)]
GivenPrompt = Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]
_GivenPrompts = GivenPrompt | Annotated[list[GivenPrompt], Field(min_length=1)]
Prompts = Annotated[list[Prompt], PlainValidator(_read_prompts, json_schema_input_type=_GivenPrompts)]
Words = Annotated[Text, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[Words], Field(max_length=_MAX_STOP_STRINGS), BeforeValidator(as_list)]
BadWords = Annotated[Items[Words], Field(max_length=_MAX_BAD_WORDS)]
LogitBias = Annotated[dict[TokenId, float], BeforeValidator(_read_token_keys), at_most(_MAX_BIASES)]
