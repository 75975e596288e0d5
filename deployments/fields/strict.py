"""Pydantic models that refuse or ignore unknown fields, one-sentence error messages, and JSON read into models.

Parsing holds the interpreter's lock even in a thread. So bodies that take long are refused: too many values, which
cost memory and garbage collection; very long numbers; deep nesting. Long texts are cheap.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from decoding.errors import InvalidRequestError

_SHOWN_CHARACTERS = 60  # of a wrong value, in messages
_SHOWN_NAMES = 12
_MOST_IGNORED = 16  # names to remember
_MOST_UNKNOWN = 64  # in one object; more are a mistake
_LONGEST_NAME = 200  # characters; no suggestion for longer names
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value) (?=should )")
_BRANCH = re.compile(r"(constrained-(str|int|float)|(list|dict)\[.*\])$")  # of a union, in pydantic's paths
_WITHOUT_VALUE = {
    "field",
    "name",
    "missing",
    "json_invalid",
    "too_short",
    "too_long",
    "string_too_short",
    "string_too_long",
}
MAX_BODY_BYTES = 6 * 2**20  # default: 4 MB of text with its escapes
_BYTES_PER_VALUE = 32  # body bytes for each value that it may have
_MOST_DIGITS = 400  # any double has fewer; parsing time grows with their square
_MOST_LEVELS = 100
_NOT_TEXT = re.compile("image|audio|video|file|document")  # in the types of message parts
_SLICE_BYTES = 2**18
Model = TypeVar("Model", bound=BaseModel)


class IgnoredFields:
    """The names of fields that a validation ignores. As the context of a validation it makes `StrictModel` lenient."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # in the order of the input

    def note(self, name: str) -> None:
        """Remember a name, of the first few."""
        if len(self.names) < _MOST_IGNORED:
            self.names.setdefault(printable(name[:_LONGEST_NAME]))


class StrictModel(BaseModel):
    """Model without type conversion or NaN. An unknown key is an error that suggests a known one, or is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    always_strict: ClassVar[bool] = False  # for objects that are no part of OpenAI's API

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, dict):
            if not isinstance(data, cls):
                required = [repr(name) for name, field in cls.model_fields.items() if field.is_required()]
                keys = " and ".join(required) or "keys and values"
                raise PydanticCustomError("dictionary", "should be a dictionary with {keys}", {"keys": keys})
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [key for key in data if key not in known]
        if not unknown:
            return data
        ignored = info.context
        if not isinstance(ignored, IgnoredFields) or cls.always_strict or len(unknown) > _MOST_UNKNOWN:
            raise cls._mistakes(data, unknown, known, info)
        for key in unknown:
            ignored.note(str(key))
        return {key: value for key, value in data.items() if key in known}

    @classmethod
    def _mistakes(
        cls, data: Mapping[Any, object], unknown: Sequence[object], known: set[str], info: ValidationInfo
    ) -> ValidationError:
        """Return an error with all mistakes: the unknown keys, then what is wrong with the others."""
        lines: list[InitErrorDetails] = []
        for key in map(str, unknown[:_MOST_UNKNOWN]):
            name = printable(key[:_LONGEST_NAME])
            lines.append({"type": wrong_field(name, f"is not known; {nearest(key, known)}"), "input": data})
        try:
            cls.model_validate({key: value for key, value in data.items() if key in known}, context=info.context)
        except ValidationError as error:
            for line in error.errors(include_url=False):
                kind = PydanticCustomError(line["type"], "{shown}", {**line.get("ctx", {}), "shown": line["msg"]})
                lines.append({"type": kind, "loc": line["loc"], "input": line["input"]})
        return ValidationError.from_exception_data(cls.__name__, lines)


class ContentPart(StrictModel):
    """A part of a message. Images, audio, video and files are refused by the name of the part."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: object) -> object:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and _NOT_TEXT.search(kind[:_LONGEST_NAME]):
            shown = printable(kind[:_LONGEST_NAME])
            raise wrong_field("type", f"is {shown!r}, but models read text only; leave the part out or describe it")
        return data


def without_surrogates(text: str) -> str:
    """Return the text; raise PydanticCustomError if it has lone surrogates."""
    if printable(text) != text:
        raise PydanticCustomError("unicode", "should be valid Unicode, without lone surrogates")
    return text


Text = Annotated[str, AfterValidator(without_surrogates)]


def without_nulls(value: object) -> object:
    """Drop an object's entries without a value."""
    return {name: entry for name, entry in value.items() if entry is not None} if isinstance(value, dict) else value


def printable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 can't encode, by question marks."""
    return text.encode(errors="replace").decode()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to append to a message about an unknown name: suggestions, or the known names."""
    names = sorted(known)
    longer = [other for other in names if name and other.startswith(name)]
    if longer:
        return f"did you mean {' or '.join(map(repr, longer[:_SHOWN_NAMES]))}?"
    close = difflib.get_close_matches(name, names, n=1) if len(name) <= _LONGEST_NAME else []
    if close:
        return f"did you mean {close[0]!r}?"
    more = ", …" if len(names) > _SHOWN_NAMES else ""
    return f"known: {', '.join(names[:_SHOWN_NAMES]) or 'none'}{more}"


def wrong_field(field: str, problem: str) -> PydanticCustomError:
    """Error for a validator of a whole model that names the wrong field."""
    return PydanticCustomError("field", "{problem}", {"field": field, "problem": problem})


def problem_of(error: ValidationError) -> tuple[str, str]:
    """Return `problem_in` of the error's first line."""
    return problems_of(error)[0]


def problems_of(error: ValidationError) -> list[tuple[str, str]]:
    """Return `problem_in` of each of the error's lines."""
    return [problem_in(each) for each in error.errors(include_url=False)]


def problem_in(error: Mapping[str, Any]) -> tuple[str, str]:
    """Dotted path of the wrong field in a line of pydantic's errors, and the problem. Path "": the whole input."""
    kind, reason, context = error["type"], _SUBJECT.sub("", error["msg"]), error.get("ctx", {})
    path = [part for part in map(str, error["loc"]) if not _BRANCH.match(part)]
    if path and path[-1] == "[key]":  # a name that is wrong
        path.pop()
    match kind:
        case "field" if context["field"]:
            path.append(context["field"])
        case "missing":
            reason = "is required"
        case "json_invalid":
            path, reason = [], f"is not valid JSON: {context['error']}"
        case "too_short" | "string_too_short" if context["min_length"] == 1:  # pydantic gives a length as the value
            reason = "should not be empty"
    if "api_keys" in path or kind in _WITHOUT_VALUE:  # never repeat an API key
        return ".".join(path), reason
    value = repr(error["input"])
    shown = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…"
    return ".".join(path), f"{reason}, not {shown}"


def most_values(max_body_bytes: int) -> int:
    """Most JSON values of a body, for a bound on its bytes."""
    return max(1, max_body_bytes // _BYTES_PER_VALUE)


def read_json(body: bytes, model: type[Model], *, max_values: int) -> tuple[Model, list[str]]:
    """Parse and validate a body. Returns it and the names of fields that were ignored; none if it says `strict: true`.

    Raises InvalidRequestError for what is not JSON or has too many values, and for a wrong field, which it names.
    """
    if have_more_values([body], max_values):
        raise InvalidRequestError(f"The body: has more than {max_values} values (numbers, texts, lists, objects).")
    try:
        # UTF-8 only (RFC 8259): the values of other encodings could not be counted.
        data = json.loads(body.decode("utf-8-sig"), parse_int=_integer) if body else None
    except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
        raise InvalidRequestError(f"The body: is not valid JSON: {error}") from error
    for name, value in data.items() if isinstance(data, dict) else ():
        if _is_deep(value):
            raise InvalidRequestError(f"{name}: is nested more than {_MOST_LEVELS} levels deep.", field=name)
    ignored = None if isinstance(data, dict) and data.get("strict") is True else IgnoredFields()
    try:
        return model.model_validate(data, context=ignored), list(ignored.names if ignored else ())
    except ValidationError as error:
        field, problem = problem_of(error)
        raise InvalidRequestError(f"{field or 'The body'}: {problem}", field=field or None) from error


def have_more_values(documents: Sequence[bytes], most: int) -> bool:
    """Whether the documents have more than `most` values in all. Each value but the first follows , [ or {."""
    return all(len(documents) + sum(map(count, documents)) > most for count in (_openings, _openings_outside_strings))


def _openings(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _openings_outside_strings(body: bytes) -> int:
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    count, in_string = 0, False
    for start in range(0, len(plain), _SLICE_BYTES):
        pieces = plain[start : start + _SLICE_BYTES].split(b'"')
        count += _openings(b" ".join(pieces[in_string::2]))
        in_string ^= len(pieces) % 2 == 0
    return count


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {_MOST_DIGITS}")
    return int(digits)


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested too deeply. Looks at each container once, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_LEVELS):
        if not level:
            return False
        children = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)
