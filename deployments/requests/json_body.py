"""Parses JSON bodies into models, at a cost that is bounded before parsing. Knows no HTTP.

Parsing holds the interpreter's lock even in a thread. So bodies that take long are refused: too many values, which
cost memory and garbage collection; very long numbers; deep nesting. Long texts are cheap.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from decoding.errors import InvalidRequestError
from deployments.validation.strict import IgnoredFields, problem_of

MAX_BODY_BYTES = 6 * 2**20  # default: 4 MB of text with its escapes
_BYTES_PER_VALUE = 32  # body bytes for each value that it may have
_MOST_DIGITS = 400  # any double has fewer; parsing time grows with their square
_MOST_LEVELS = 100
_SLICE_BYTES = 2**18

Model = TypeVar("Model", bound=BaseModel)


def most_values(max_body_bytes: int) -> int:
    """Most JSON values of a body, for a bound on its bytes."""
    return max(1, max_body_bytes // _BYTES_PER_VALUE)


def read_json(body: bytes, model: type[Model], *, max_values: int) -> tuple[Model, list[str]]:
    """Parse and validate a body. Returns it and the names of fields that were ignored; none if it says `strict: true`.

    Raises:
        InvalidRequestError: not JSON, too many values, or a field is wrong; names the field.
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
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _items(value: Any) -> Any:
    match value:
        case dict():
            return value.values()
        case list():
            return value
    return ()
