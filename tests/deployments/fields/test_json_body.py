"""Bodies that are refused before they are parsed. Commas in strings don't count as values."""

import json

import pytest
from pydantic import BaseModel

from decoding.errors import InvalidRequestError
from deployments.fields.strict import have_more_values, read_json


class Anything(BaseModel):
    """A model with one field."""

    x: object = None


def read(text: str, max_values: int = 100) -> object:
    return read_json(text.encode(), Anything, max_values=max_values)[0].x


@pytest.mark.parametrize(
    ("document", "most"),
    [
        ("1", 1),
        ("[1,2,3]", 4),
        ('{"a":1,"b":[2,3]}', 5),
        ('["a,b,[{","\\"[[[,,,","\\\\",4]', 5),
        ('"' + ',"'[:1] * 999 + '"', 1),
    ],
)
def test_values_are_counted_and_texts_are_none(document: str, most: int) -> None:
    assert json.loads(document) is not None
    assert not have_more_values([document.encode()], most)
    assert have_more_values([document.encode()], most - 1)


def test_texts_may_be_as_long_as_slices_and_longer() -> None:
    texts = ["a,[\\" * size for size in (1, 2**18 - 1, 2**18, 300_001)]
    document = json.dumps(texts).encode()
    assert not have_more_values([document], 5)
    assert have_more_values([document], 4)


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ('{"x":[' + "0," * 200 + "0]}", None, "more than 100 values"),
        ('{"x":' + "9" * 401 + "}", None, "a number has 401 digits"),
        ('{"x":' + '{"a":' * 101 + "1" + "}" * 102, "x", "more than 100 levels"),
        ("{", None, "is not valid JSON"),
        ("[1]", None, "The body: "),
        ("", None, "The body: "),
    ],
)
def test_what_costs_too_much_is_refused_by_name(text: str, field: str | None, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        read(text, 300 if field else 100)
    assert refused.value.field == field


def test_what_is_usual_is_taken() -> None:
    assert read('{"x":' + "9" * 300 + "}") == int("9" * 300)
    assert read('{"x":' + "[" * 100 + "]" * 100 + "}", 300) is not None
    assert read(json.dumps({"x": "a, [b], {c}" * 1000})) == "a, [b], {c}" * 1000


def test_other_encodings_are_refused() -> None:
    """In UTF-16 a byte of a character may look like a quote, which would hide values from the count."""
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        read_json('{"x":"∀"}'.encode("utf-16-le"), Anything, max_values=100)
