"""Invalid definitions are refused with field and reason; valid ones are compiled once."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import MAX_DEFINITION, Grammar, GrammarCompiler
from decoding.sampling.params import Structure, StructureKind
from tests.support.structures import tokenizer

WORD = Structure(kind="regex", definition="[a-z]+")


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(link: Callable[[str], dict[str, Any]]) -> str:
    """Return a schema of maximum size whose definitions form one chain of references."""
    definitions: dict[str, Any] = {}
    while len(json.dumps(definitions)) < MAX_DEFINITION["json"] - 1_000:
        for number in range(len(definitions), len(definitions) + 10):
            definitions[f"d{number}"] = link(f"#/$defs/d{number + 1}")
    definitions[f"d{len(definitions)}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


@pytest.mark.parametrize(
    ("kind", "definition", "reason"),
    [
        ("json", "{", "Expecting property name"),
        ("json", "[1]", "a schema is an object"),
        ("json", "true", "a schema is an object"),
        ("json", '{"type": "objct"}', "Invalid type: objct"),
        ("json", '{"type": "string", "format": "zip"}', "Unknown format: zip"),
        ("json", '{"not": {"type": "string"}}', "not"),
        ("json", '{"if": {"type": "string"}, "then": {"maxLength": 3}}', "if"),
        ("json", '{"$ref": "https://example.com/schema"}', "example.com"),
        ("json", '{"$ref": "#/$defs/a"}', "$defs/a"),
        ("json", '{"$ref": "#"}', "no token leads on to a match"),
        ("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json", '{"type": "string", "pattern": "(?=a)"}', "look-around"),
        ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json", '{"type": "integer", "minimum": 2.1, "maximum": 2.9}', "no integer"),
        ("json", '{"type": "object", "minProperties": 2}', "minProperties 2"),
        ("json", '{"type": "integer", "exclusiveMinimum": 1%s}' % ("0" * 400), "too large"),
        ("json", '{"const": "\\ud800"}', "hex escape"),
        ("json", nested(200), "recursion"),
        ("json", nested(5_000), "recursion"),
        ("json", '{"enum": [' + "1," * 70_000 + "1]}", "140013 characters"),
        ("regex", "(ab", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"[^\s\S]", "no token leads on to a match"),
        ("regex", "(a|bc)*" * 1_000, "too complex"),
        ("regex", "a" * 8_193, "8193 characters"),
        ("choice", "yes", "Expecting value"),
        ("choice", "[]", "a list of at least one text"),
        ("choice", '["yes", 1]', "a list of at least one text"),
        ("choice", '"yes"', "a list of at least one text"),
        ("grammar", "", "No 'root' rule"),
        ("grammar", "start: ( :", "Expected value"),
        ("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "nested"),
        ("grammar", 'start: "a" | other', "other"),
        ("grammar", "root ::= (", "GBNF"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: StructureKind, definition: str, reason: str) -> None:
    began_s = time.perf_counter()
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs.{kind}: ") as caught:
        Grammar(Structure(kind=kind, definition=definition), tokenizer())
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == f"structured_outputs.{kind}"
    assert time.perf_counter() - began_s < 10


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("json", "{}"),
        ("json", json.dumps({"enum": [f"value {number}" for number in range(4_000)]})),
        ("json", json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1_500)}})),
        ("json", chain(lambda after: {"$ref": after})),
        ("json", chain(lambda after: {"anyOf": [{"$ref": after}, {"type": "null"}]})),
        ("json", chain(lambda after: {"properties": {"a": {"items": {"items": {"$ref": after}}}}})),
        ("json", '{"type": "array", "minItems": 100000000}'),
        ("regex", ".{0,100000}"),
        ("regex", "(a|b)*a(a|b){200}"),
        ("regex", "a?" * 4_000),
        ("choice", json.dumps([f"choice {number}" for number in range(3_500)])),
        ("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(1_200)) + 'r1200: "a"'),
        ("grammar", "start: R0\n" + "".join(f'R{n}: ("z" R{n + 1})?\n' for n in range(700)) + 'R700: "a"'),
    ],
)
def test_large_ones_compile_in_seconds(kind: StructureKind, definition: str) -> None:
    assert MAX_DEFINITION[kind] / 2 < len(definition) <= MAX_DEFINITION[kind] or len(definition) < 50
    began_s = time.perf_counter()
    Grammar(Structure(kind=kind, definition=definition), tokenizer())
    assert time.perf_counter() - began_s < 10


class _Panic(BaseException):
    """Stands in for a panic of the engine, which is written in Rust."""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("fault", [RuntimeError("no memory"), _Panic("index out of bounds")], ids=repr)
def test_a_fault_of_the_engine_is_an_error_and_no_wait_for_ever(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise fault

    engine = tokenizer()
    monkeypatch.setattr("decoding.grammars.grammar.LLMatcher", broken)
    with pytest.raises(InvalidRequestError, match=f"structured_outputs.grammar: it can't be compiled: .*{fault}"):
        Grammar(Structure(kind="grammar", definition='start: "a"'), engine)


def test_many_requests_share_one_compilation() -> None:
    compiler = GrammarCompiler(tokenizer(), capacity=2)
    try:
        futures = [compiler.start(WORD) for _ in range(20)]
        assert len({id(future.result()) for future in futures}) == 1
        assert compiler.compile(Structure(kind="regex", definition="[a-z]+")) is futures[0].result()
    finally:
        compiler.close()


def test_those_used_last_are_kept() -> None:
    compiler = GrammarCompiler(tokenizer(), capacity=2)
    try:
        word, number = compiler.compile(WORD), Structure(kind="regex", definition="[0-9]+")
        compiled_number = compiler.compile(number)
        assert compiler.compile(WORD) is word
        compiler.compile(Structure(kind="regex", definition="x"))
        assert compiler.compile(WORD) is word
        assert compiler.compile(number) is not compiled_number
    finally:
        compiler.close()


def test_every_request_with_a_wrong_definition_is_told() -> None:
    compiler = GrammarCompiler(tokenizer())
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                compiler.compile(Structure(kind="regex", definition="(ab"))
    finally:
        compiler.close()
