"""Grammars allow what a schema allows, however keys are spelled; schemas without need for it do not change."""

import calendar
import datetime
import ipaddress
import json
import random
import uuid
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import Grammar
from decoding.grammars.json_schema import strict
from tests.support.structures import compiled, matches

ROLE: dict[str, Any] = {"type": "object", "properties": {"role": {"enum": ["user"]}}, "required": ["role"]}
SCHEMAS: list[dict[str, Any]] = [
    ROLE,
    {"properties": {"role": {"enum": ["user"]}}},
    {**ROLE, "additionalProperties": {"type": "string", "maxLength": 3}},
    {**ROLE, "additionalProperties": {}},
    {**ROLE, "properties": {"role": {"enum": ["user"]}, "a\x1bb": {"type": "integer"}, "\n": {"type": "null"}}},
    {**ROLE, "properties": {"role": {"enum": ["user"]}, "\x7f": {"type": "integer"}, "é😀": {"type": "null"}}},
    {**ROLE, "patternProperties": {"^r": {"const": "user"}, "^x": {"type": "boolean"}}},
    {**ROLE, "patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": {"type": "integer"}},
    {**ROLE, "patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": False},
    {"allOf": [ROLE, {"properties": {"xq": {"type": "integer"}}}, {"required": ["é😀"]}]},
    {"allOf": [ROLE, {"additionalProperties": {"enum": ["user", 1]}}]},
    {"anyOf": [{"required": ["xq"], "properties": {"role": {"type": "integer"}}}, ROLE]},
    {"$ref": "#/$defs/role", "$defs": {"role": ROLE}, "properties": {"\n": {"type": "null"}}},
]
KEYS = ["role", "xq", "é😀", "\n", "a\x1bb", "\x7f", "rol", "role ", 'q"\\', "/"]


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return compiled("json", json.dumps(schema))


def spelled(character: str, style: int) -> str:
    """Return a character in JSON: plain if it can be, by its number in either case, or by a short escape."""
    plain = json.dumps(character, ensure_ascii=False)[1:-1]
    units = character.encode("utf-16-be").hex()
    numbered = "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
    return (plain, numbered, numbered.upper().replace("U", "u"), "\\/" if character == "/" else plain)[style % 4]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_no_spelling_of_a_key_breaks_the_schema(schema: dict[str, Any]) -> None:
    """The judge is `jsonschema`, on what `json` reads; where a key comes twice, the last one counts."""
    random_, judge, accepted = random.Random(5), jsonschema.Draft202012Validator(schema), 0
    grammar = grammar_of(schema)
    for _ in range(1500):
        keys = random_.choices(KEYS, k=random_.choice((0, 1, 2)))
        entries = [(key, random_.choice(("user", 1, True, None, "s"))) for key in ["role", *keys]]
        entries = entries if random_.random() < 0.9 else entries[1:]
        style = random_.choice((0, 0, 1, 2, 3, None))  # None: mixed
        texts = []
        for key, value in entries:
            letters = [spelled(letter, random_.choice((0, 0, 0, 1, 2)) if style is None else style) for letter in key]
            texts.append(f'"{"".join(letters)}":{json.dumps("user" if key == "role" and style == 0 else value)}')
        text = "{" + ",".join(texts) + "}"
        if matches(grammar, text):
            accepted += 1
            judge.validate(json.loads(text))
    assert accepted > 5


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (ROLE, '{"role":"user","\\u0072ole":"admin"}'),
        (ROLE, '{"role":"user","\\u0072\\u006F\\u006c\\u0065":"admin"}'),
        (ROLE, '{"role":"user","role":"user"}'),
        (ROLE, '{"role":"user","\\ud800":1}'),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, '{"\\u0061":"x"}'),
        ({"properties": {"\x1b": {"type": "integer"}}}, '{"\\u001B":"x"}'),
        ({"properties": {"\n": {"type": "integer"}}}, '{"\\u000a":"x"}'),
        ({"properties": {"\x7f": {"type": "integer"}}}, '{"\\u007f":"x"}'),
        ({"properties": {"😀": {"type": "integer"}}}, '{"\\ud83d\\ude00":"x"}'),
        (
            {"patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": {"type": "integer"}},
            '{"\\u0078q":1}',
        ),
    ],
)
def test_other_spellings_of_declared_keys_are_refused(schema: dict[str, Any], text: str) -> None:
    assert not matches(grammar_of(schema), text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (ROLE, '{"role":"user","x":{"y":[1]},"é":"\\u001b[1m","tab\\t":"😀"}'),
        ({"type": "object"}, '{"\\u001b":"\\u0000"}'),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"a":"\\u001B","\\n":""}'),
        ({**ROLE, "patternProperties": {"^x": True}}, '{"role":"user","x":1,"y\\n":"é"}'),
    ],
)
def test_what_is_no_other_spelling_stays_allowed(schema: dict[str, Any], text: str) -> None:
    assert matches(grammar_of(schema), text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "path"}, '"/tmp"'),  # pydantic's pathlib.Path
        ({"type": "integer", "format": "int64"}, "7"),  # OpenAPI's
        ({"type": "string", "format": "cuid", "pattern": "^c[0-9]+$"}, '"c1"'),  # zod's
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
            '{"a":null}',
        ),
    ],
)
def test_what_restricts_nothing_is_left_out(schema: dict[str, Any], text: str) -> None:
    assert matches(grammar_of(schema), text)
    assert not matches(grammar_of(schema), "true")


@pytest.mark.parametrize(
    "schema", [{"type": "string", "format": "uri-reference"}, {"type": "object", "propertyNames": {"maxLength": 3}}]
)
def test_what_is_not_enforced_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"uri-reference|propertyNames"):
        grammar_of(schema)


def test_compact_schemas_have_no_blanks_and_other_options_are_not_taken() -> None:
    schema = {**ROLE, "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": ".*", "lenient": True}}
    text = '{"role":"user","a":[1,2]}'
    assert matches(grammar_of(schema), text)
    assert not any(
        matches(grammar_of(schema), text.replace(*blank)) for blank in [(",", ", "), (":", ": "), ("{", "{ ")]
    )
    loose = grammar_of({**ROLE, "x-guidance": {"whitespace_pattern": "x", "item_separator": ";"}})
    assert matches(loose, text.replace(",", ",\n "))
    assert not matches(loose, text.replace(",", ";"))


@pytest.mark.parametrize("literal", [{"const": 2**53 + 1}, {"enum": ["a", {"b": [1234567890123456789]}]}])
def test_numbers_that_float64_lacks_are_no_literals(literal: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.json: \d+ is too large to be told from"):
        grammar_of(literal)


def without_options(schema: dict[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword != "x-guidance"}


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
        "additionalProperties": False,
    }
    assert without_options(strict(schema)) == schema


def test_bounds_are_rewritten_wherever_a_schema_may_be() -> None:
    bound = {"exclusiveMinimum": 2, "minimum": 1}
    rewritten = without_options(strict(bound))
    assert list(rewritten) == ["minimum"]
    assert 2 < rewritten["minimum"] < 2.000001
    assert without_options(strict({"exclusiveMaximum": -2, "maximum": -9})) == {"maximum": -9}
    for schema in (
        {"$defs": {"const": bound}},
        {"properties": {"enum": bound}, "additionalProperties": False},
        {"anyOf": [{"type": "null"}, bound]},
        {"items": {"prefixItems": [bound]}},
    ):
        written = json.dumps(without_options(strict(schema)))
        assert written == json.dumps(schema).replace(json.dumps(bound), json.dumps(rewritten))


@pytest.mark.parametrize(
    ("required", "least", "fine"), [([], 1, True), ([], 2, False), (["a", "b"], 3, True), (["a", "b"], 4, False)]
)
def test_different_keys_cannot_be_asked_for(required: list[str], least: int, fine: bool) -> None:
    schema = {"type": "object", "required": required, "minProperties": least}
    text = json.dumps(dict.fromkeys([*required, "c"], 1))
    if fine:
        assert matches(grammar_of(schema), text)
    else:
        with pytest.raises(InvalidRequestError, match="minProperties"):
            grammar_of(schema)


def fits(name: str, text: str) -> bool:
    return matches(
        compiled("json", json.dumps({"type": "string", "format": name})), json.dumps(text, ensure_ascii=False)
    )


def is_valid(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_every_day_of_the_calendar_and_no_other() -> None:
    for year in [*range(1, 10_000, 97), 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9996, 9999]:
        for month in (0, 1, 2, 4, 12, 13):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert fits("date", text) == is_valid(datetime.date.fromisoformat, text), text


def test_29_february_of_leap_years_only() -> None:
    for year in range(1, 10_000):
        assert fits("date", f"{year:04}-02-29") == calendar.isleap(year)
    assert not fits("date-time", "2023-02-29T12:00:00Z")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("23:59:60Z", True),
        ("15:59:60-08:00", True),
        ("01:59:60.25+02:00", True),
        ("22:59:60Z", False),
        ("23:59:61Z", False),
        ("15:59:60+08:00", False),
    ],
)
def test_leap_seconds_end_a_day_in_utc(text: str, fine: bool) -> None:
    assert fits("time", text) == fine
    assert fits("date-time", f"1990-12-31T{text}") == fine


def test_times_of_the_day() -> None:
    random_ = random.Random(1)
    for _ in range(2000):
        hour, minute, second = (random_.randrange(top) for top in (26, 62, 60))
        zone = random_.choice(["Z", "+00:00", "-23:59", "+05:30", "+24:00", ""])
        text = f"{hour:02}:{minute:02}:{second:02}{random_.choice(['', '.5', '.123456'])}{zone}"
        fine = zone != "" and is_valid(datetime.time.fromisoformat, text.replace("Z", "+00:00"))
        assert fits("time", text) == fine, text
        assert fits("date-time", f"2024-02-29T{text}") == fine, text


def test_addresses() -> None:
    random_ = random.Random(2)
    for _ in range(4000):
        groups = [
            random_.choice(["0", "1", "ffff", "ABCD", "0001", "g", "12345"][: random_.choice((5, 5, 7))])
            for _ in range(9)
        ]
        words = groups[: random_.randrange(1, 10)]
        if random_.random() < 0.4:
            words[-1] = random_.choice(["1.2.3.4", "255.255.255.255", "1.2.3", "256.1.1.1"])
        text = ":".join(words)
        if random_.random() < 0.7:
            index = random_.randrange(len(words) + 1)
            text = ":".join(words[:index]) + "::" + ":".join(words[index:])
        assert fits("ipv6", text) == is_valid(ipaddress.IPv6Address, text), text
    for _ in range(1000):
        text = ".".join(
            random_.choice(["0", "9", "10", "99", "199", "249", "255", "256", "01", ""])
            for _ in range(random_.choice((3, 4, 4, 5)))
        )
        assert fits("ipv4", text) == is_valid(ipaddress.IPv4Address, text), text


def test_identifiers() -> None:
    random_ = random.Random(3)
    for _ in range(200):
        text = str(uuid.UUID(int=random_.getrandbits(128)))
        assert fits("uuid", text)
        assert fits("uuid", text.upper())
        cut = random_.randrange(len(text))
        assert not fits("uuid", text[:cut] + text[cut + 1 :])


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("ipv6", ["::ffff:1.2.3.4", "::", "1::", "64:ff9b::192.0.2.33"], ["1::2::3", ":1", "::1%eth0", "1.2.3.4"]),
        (
            "duration",
            ["P1Y2M3DT4H5M6S", "P1W", "PT0S", "P1M", "P4DT12H"],
            ["P", "PT", "P1", "P1YT", "P2S", "P1Y2W", "1D"],
        ),
        (
            "email",
            ["a.b+c@d-e.org", '"joe bloggs"@example.com', "a@[127.0.0.1]", "a@[IPv6:::1]", "a@b"],
            ["a", "a@", "@b", "a..b@c", ".a@b", "a.@b", "a b@c", "a@-b", "a@b-", "a@[127.0.0.300]", "a@" + "b" * 64],
        ),
        (
            "hostname",
            ["example.com", "a", "1", "a-b.c", "a" * 63, ".".join(["a" * 63] * 3)],
            ["", "-a", "a-", "a..b", ".a", "a.", "a_b", "a" * 64, ".".join(["a" * 63] * 4), "é"],
        ),
        (
            "uri",
            [
                "http://a.b/c?d=e#f",
                "http://[::ffff:1.2.3.4]:80/",
                "urn:isbn:1",
                "mailto:a@b",
                "file:///x",
                "a:",
                "a://b%20c",
            ],
            [
                "a",
                "/a",
                "//a/b",
                "http:// a",
                "http://a b",
                "a:%2",
                "http://[::1",
                "1a:b",
                "a:<b>",
                "a:#b#c",
                "http://é",
            ],
        ),
    ],
)
def test_texts_by_their_rfc(name: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not fits(name, text)] == []
    assert [text for text in wrong if fits(name, text)] == []


def test_a_format_beside_a_pattern_and_a_length() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024", "maxLength": 10}
    grammar = compiled("json", json.dumps(schema))
    assert [matches(grammar, f'"{text}"') for text in ("2024-02-29", "2023-02-28", "2024-02-30")] == [
        True,
        False,
        False,
    ]
    short = compiled("json", json.dumps({"type": "string", "format": "hostname", "maxLength": 3}))
    assert [matches(short, f'"{text}"') for text in ("a.b", "a.bc")] == [True, False]
