"""Rewritten schemas allow nothing that the schema forbids; other schemas do not change."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import Grammar
from decoding.grammars.json_schema import strict
from decoding.sampling.params import Structure
from tests.support.properties import repeatable
from tests.support.structures import tokenizer

BOUNDS = st.one_of(st.integers(-30, 30), st.integers(-3000, 3000).map(lambda hundredths: hundredths / 100))


def matches(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    tokens = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def near(number: float) -> list[str]:
    """Return spellings of a number and of its neighbours."""
    shifted = [number + shift for shift in (0, 0.01, -0.01, 0.1, -0.1, 1, -1)]
    whole = [str(math.floor(value)) for value in shifted]
    return [*whole, *(f"{value:.2f}" for value in shifted), *(f"{value:.3f}" for value in shifted), "-0", "0.0"]


@repeatable
@given(
    st.sampled_from(["integer", "number"]),
    BOUNDS,
    st.one_of(st.none(), st.floats(0.01, 30).map(lambda width: round(width, 2))),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_numbers_keep_to_their_bounds(
    kind: str, bound: float, width: float | None, mirrored: bool, low_open: bool, high_open: bool
) -> None:
    low, high = bound, math.inf if width is None else round(bound + width, 2)
    if mirrored:
        low, high = -high, -low
    schema: dict[str, Any] = {"type": kind}
    if math.isfinite(low):
        schema["exclusiveMinimum" if low_open else "minimum"] = low
    if math.isfinite(high):
        schema["exclusiveMaximum" if high_open else "maximum"] = high
    try:
        grammar = Grammar(Structure(kind="json", definition=json.dumps(schema)), tokenizer())
    except InvalidRequestError:
        return  # no number is within the bounds
    for text in {text for end in (low, high) if math.isfinite(end) for text in near(end)}:
        value = float(text)
        above = low < value or (value == low and not low_open)
        below = value < high or (value == high and not high_open)
        assert (above and below) or not matches(grammar, text)


@pytest.mark.parametrize(
    ("kind", "bound", "least"),
    [
        ("integer", 0, 1),
        ("integer", 2.5, 3),
        ("integer", 2**51, 2**51 + 1),
        (["integer", "null"], float(2**52), 2**52 + 1),
        ("integer", 2**53 - 1, 2**53),
        ("integer", 2**53, 2**53 + 2),  # to llguidance 2**53 + 1 is the same number
        ("integer", 2**53 + 1, 2**53 + 4),
        (["integer", "number"], 2, 3),
    ],
)
def test_integers_begin_right_after_an_exclusive_bound(kind: str | list[str], bound: float, least: int) -> None:
    above = {"type": kind, "exclusiveMinimum": bound}
    below = {"type": kind, "exclusiveMaximum": -bound}
    for schema, sign in ((above, ""), (below, "-")):
        grammar = Grammar(Structure(kind="json", definition=json.dumps(schema)), tokenizer())
        assert matches(grammar, f"{sign}{least}")
        assert not matches(grammar, f"{sign}{int(bound)}")


def test_both_kinds_of_numbers_keep_what_is_between() -> None:
    definition = json.dumps({"type": ["integer", "number"], "exclusiveMinimum": 2})
    grammar = Grammar(Structure(kind="json", definition=definition), tokenizer())
    assert [matches(grammar, text) for text in ("2", "2.0", "2.25", "3")] == [False, False, True, True]


def test_names_and_data_are_left_alone() -> None:
    schema = {
        "type": "object",
        "properties": {
            "exclusiveMinimum": {"type": "integer"},
            "const": {"const": {"exclusiveMinimum": 3, "minProperties": 9}},
            "enum": {"enum": [{"exclusiveMinimum": 3}]},
            "x": {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 7},
            "y": False,
        },
        "required": ["x"],
        "minProperties": 6,
    }
    assert strict(schema) == schema


def test_bounds_are_rewritten_wherever_a_schema_may_be() -> None:
    bound, rewritten = {"exclusiveMinimum": 2, "minimum": 1}, strict({"exclusiveMinimum": 2, "minimum": 1})
    assert list(rewritten) == ["minimum"]
    assert 2 < rewritten["minimum"] < 2.000001
    assert strict({"exclusiveMaximum": -2, "maximum": -9}) == {"maximum": -9}
    for schema in (
        {"$defs": {"const": bound}},
        {"properties": {"enum": bound}},
        {"anyOf": [{"type": "null"}, bound]},
        {"items": {"prefixItems": [bound]}},
    ):
        assert json.dumps(strict(schema)) == json.dumps(schema).replace(json.dumps(bound), json.dumps(rewritten))


@pytest.mark.parametrize(
    ("required", "least", "fine"), [([], 1, True), ([], 2, False), (["a", "b"], 3, True), (["a", "b"], 4, False)]
)
def test_different_keys_cannot_be_asked_for(required: list[str], least: int, fine: bool) -> None:
    schema = {"type": "object", "required": required, "minProperties": least}
    if fine:
        assert strict(schema) == schema
    else:
        with pytest.raises(ValueError, match="minProperties"):
            strict(schema)
