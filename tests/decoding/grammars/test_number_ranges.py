"""Grammars of bounded numbers are exact, by the arithmetic of fractions."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import Grammar
from tests.support.properties import repeatable
from tests.support.structures import compiled, matches

NUMBERS = st.tuples(st.integers(-3000, 3000), st.integers(0, 4)).map(lambda pair: Decimal(pair[0]).scaleb(-pair[1]))
STEPS = st.sampled_from(["1", "2", "3", "7", "10", "0.5", "0.25", "0.1", "0.05", "0.01", "1.5", "0.3"]).map(Decimal)
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return compiled("json", json.dumps(schema))


def as_json(number: Decimal) -> float:
    return int(number) if number % 1 == 0 else float(number)


def plain(number: Decimal) -> str:
    text = format(number.normalize(), "f")
    return "0" if text == "-0" else text


def allows(schema: dict[str, Any], text: str) -> bool:
    """The judge: what JSON Schema says of a number without needless zeros."""
    number, bound = Fraction(text), {name: Fraction(str(value)) for name, value in schema.items() if name != "type"}
    return (
        number >= bound.get("minimum", number)
        and number <= bound.get("maximum", number)
        and number > bound.get("exclusiveMinimum", number - 1)
        and number < bound.get("exclusiveMaximum", number + 1)
        and number % bound.get("multipleOf", Fraction(1, 10**9)) == 0
        and (schema["type"] == "number" or "." not in text)
    )


def near(numbers: list[Decimal]) -> set[str]:
    """Return numbers, their neighbours, and their beginnings."""
    shifts = [Decimal(0), *(sign * Decimal(10) ** -places for places in range(5) for sign in (1, -1))]
    shifted = {plain(number + shift) for number in numbers for shift in shifts}
    return shifted | {plain(round(number, places)) for number in numbers for places in range(4)}


@repeatable
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, min_size=1),
    st.one_of(st.none(), st.none(), STEPS),
    st.booleans(),
    st.lists(NUMBERS, max_size=9),
)
def test_numbers_keep_to_their_bounds(
    kind: str, bounds: dict[str, Decimal], step: Decimal | None, apart: bool, others: list[Decimal]
) -> None:
    """apart: each bound comes in a schema of its own."""
    given_ = bounds | ({} if step is None else {"multipleOf": step})
    flat = {"type": kind} | {name: as_json(value) for name, value in given_.items()}
    parted = {"allOf": [{"type": kind}, *({name: as_json(value)} for name, value in given_.items())]}
    texts = near([*given_.values(), *others])
    try:
        grammar = grammar_of(parted if apart else flat)
    except InvalidRequestError:
        assert apart or not any(allows(flat, text) for text in texts)
        return
    for text in texts:
        if apart and step is not None:  # llguidance joins steps with bounds by its own arithmetic, which may refuse
            assert allows(flat, text) or not matches(grammar, text)
        else:
            assert matches(grammar, text) == allows(flat, text), (text, flat)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 0.1, "maximum": 0.25}, ["0.1", "0.10", "0.2", "0.25", "0.249"], ["0.09", "0.26", "0.251", "0"]),
        ({"exclusiveMinimum": 1.5, "exclusiveMaximum": 3.25}, ["3.2", "1.51", "3"], ["1.5", "1.50", "3.25"]),
        ({"minimum": -0.257, "maximum": -0.1}, ["-0.2", "-0.25", "-0.257", "-0.1"], ["-0.258", "-0.3", "-0.09"]),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, ["2.1", "2.5"], ["2", "2.0", "2.6"]),
        ({"minimum": 0.25, "maximum": 0.3, "multipleOf": 0.1}, ["0.3"], ["0.2", "0.25"]),
        ({"multipleOf": 0.25}, ["0.5", "0.75", "3", "-1.25"], ["0.3", "0.125"]),
        ({"minimum": 0, "maximum": 1.7976931348623157e308}, ["0", "1.5", "9000000000000000000"], ["-1"]),
        ({"type": ["number", "null"], "maximum": 0.25}, ["null", "0.2", "-7"], ["0.3", '"a"']),
        ({"maximum": 0.25, "anyOf": [{"minimum": 0.2}, {"type": "string"}]}, ["0.2", '"a"'], ["0.1", "0.3"]),
    ],
)
def test_what_was_wrong_once(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of({"type": "number"} | schema if "anyOf" not in schema else schema)
    assert [text for text in right if not matches(grammar, text)] == []
    assert [text for text in wrong if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("kind", "bound", "least"),
    [
        ("integer", 0, 1),
        ("integer", 2.5, 3),
        ("integer", 2**51, 2**51 + 1),
        (["integer", "null"], float(2**52), 2**52 + 1),
        ("integer", 2**53 - 1, 2**53),
        ("integer", 2**53, 2**53 + 2),  # float64 lacks 2**53 + 1
        ("integer", 2**53 + 1, 2**53 + 2),
        (["integer", "number"], 2, 3),
    ],
)
def test_integers_begin_right_after_an_exclusive_bound(kind: str | list[str], bound: float, least: int) -> None:
    above = {"type": kind, "exclusiveMinimum": bound}
    below = {"type": kind, "exclusiveMaximum": -bound}
    for schema, sign in ((above, ""), (below, "-")):
        grammar = grammar_of(schema)
        assert matches(grammar, f"{sign}{least}")
        assert not matches(grammar, f"{sign}{math.floor(bound)}")


def test_both_kinds_of_numbers_keep_what_is_between() -> None:
    grammar = grammar_of({"type": ["integer", "number"], "exclusiveMinimum": 2})
    assert [matches(grammar, text) for text in ("2", "2.0", "2.25", "3")] == [False, False, True, True]


@pytest.mark.parametrize("bound", [2**64 - 1, 2**63 - 1, 2**63, 10**30])
def test_bounds_beyond_64_bits_allow_the_numbers_within(bound: int) -> None:
    grammar = grammar_of({"type": "integer", "minimum": -bound, "maximum": bound})
    assert all(matches(grammar, text) for text in ("0", "-5", str(2**62), str(-(2**62))))
    assert not matches(grammar, str(bound + 1))
    with pytest.raises(InvalidRequestError, match="too large"):
        grammar_of({"type": "integer", "minimum": 2**63 + bound})
