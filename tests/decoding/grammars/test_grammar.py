"""Invalid definitions are refused with field and reason; valid ones are compiled once."""

import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import MAX_DEFINITION, Grammar, GrammarCompiler
from decoding.sampling.params import Structure, StructureKind
from tests.support.structures import NO_DRAFT, follow, matches, tokenizer

WORD = Structure(kind="regex", definition="[a-z]+")


def properties(count: int, *, required: int) -> str:
    named = {f"p{number:04}": {"type": "null"} for number in range(count)}
    return json.dumps({"type": "object", "properties": named, "required": [*named][:required]})


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
        ("json", '{"type": "string", "format": "iri"}', "Unknown format: iri"),
        ("json", '{"not": {"type": "string"}}', "not"),
        ("json", '{"if": {"type": "string"}, "then": {"maxLength": 3}}', "if"),
        ("json", '{"$ref": "https://example.com/schema"}', "example.com"),
        ("json", '{"$ref": "#/$defs/a"}', "$defs/a"),
        ("json", '{"$ref": "#"}', "no token leads on to a match"),
        ("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json", '{"type": "string", "pattern": "(?=a)"}', "look-around"),
        ("json", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json", '{"type": "integer", "minimum": 2.1, "maximum": 2.9}', "no integer"),
        ("json", '{"type": "integer", "multipleOf": 2147483648}', "too many digits"),
        ("json", '{"type": "number", "multipleOf": 214748364.8}', "too many digits"),
        ("json", '{"type": "object", "minProperties": 2}', "minProperties 2"),
        ("json", '{"type": "integer", "exclusiveMinimum": 1%s}' % ("0" * 400), "too large"),
        ("json", '{"const": "\\ud800"}', "hex escape"),
        ("json", nested(200), "nested too deeply"),
        ("json", nested(500), "nested too deeply"),
        ("json", nested(5_000), "nested too deeply"),
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
        ("grammar", r'root ::= "\ud800"', "surrogates"),
        ("grammar", r'root ::= "\U00110000"', "range"),
    ],
)
def test_what_cannot_be_compiled_is_refused(kind: StructureKind, definition: str, reason: str) -> None:
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs.{kind}: ") as caught:
        Grammar(Structure(kind=kind, definition=definition), tokenizer())
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == f"structured_outputs.{kind}"
    assert time.process_time() - began_s < 10


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("json", "{}"),
        ("json", json.dumps({"enum": [f"value {number}" for number in range(4_000)]})),
        ("json", properties(1_500, required=1_500)),
        ("json", chain(lambda after: {"$ref": after})),
        ("json", chain(lambda after: {"anyOf": [{"$ref": after}, {"type": "null"}]})),
        ("json", chain(lambda after: {"properties": {"a": {"items": {"items": {"$ref": after}}}}})),
        ("json", '{"type": "array", "minItems": 100000000}'),
        ("regex", ".{0,100000}"),
        ("regex", "(a|b)*a(a|b){200}"),
        ("regex", "a?" * 4_000),
        ("choice", json.dumps([f"choice {number}" for number in range(3_500)])),
        ("choice", json.dumps([f"{number:03x}" for number in range(0x1000)] * 2)),
        ("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(1_200)) + 'r1200: "a"'),
        ("grammar", "start: R0\n" + "".join(f'R{n}: ("z" R{n + 1})?\n' for n in range(700)) + 'R700: "a"'),
    ],
)
def test_large_ones_compile_in_seconds(kind: StructureKind, definition: str) -> None:
    assert MAX_DEFINITION[kind] / 2 < len(definition) <= MAX_DEFINITION[kind] or len(definition) < 50
    began_s = time.process_time()
    Grammar(Structure(kind=kind, definition=definition), tokenizer())
    assert time.process_time() - began_s < 10


@pytest.mark.parametrize("texts", [[f"choice {n}" for n in range(3_500)], [chr(0x4E00 + n) for n in range(13_000)]])
def test_every_text_of_a_long_list_can_be_chosen(texts: list[str]) -> None:
    grammar = Grammar(Structure(kind="choice", definition=json.dumps(texts, ensure_ascii=False)), tokenizer())
    assert [text for text in [*texts[::500], texts[-1]] if not matches(grammar, text)] == []
    assert not matches(grammar, f"{texts[0]}!")


def test_every_optional_property_of_many_can_be_left_out_or_written() -> None:
    """The engine has a bound of its own, which it would only find in the answer."""
    grammar = Grammar(Structure(kind="json", definition=properties(500, required=10)), tokenizer())
    first, last = ({f"p{number:04}": None for number in range(count)} for count in (10, 500))
    assert matches(grammar, json.dumps(first))
    assert matches(grammar, json.dumps(first | {"p0499": None}))
    assert matches(grammar, json.dumps(last))
    with pytest.raises(InvalidRequestError, match="491 optional properties of an object are more than the 490 allowed"):
        Grammar(Structure(kind="json", definition=properties(501, required=10)), tokenizer())


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
    compiler = GrammarCompiler(tokenizer())
    try:
        futures = [compiler.start(WORD) for _ in range(20)]
        assert len({id(future.result()) for future in futures}) == 1
        assert compiler.compile(Structure(kind="regex", definition="[a-z]+")) is futures[0].result()
    finally:
        compiler.close()


def test_those_used_last_are_kept() -> None:
    number = Structure(kind="regex", definition="[0-9]+")
    compiler = GrammarCompiler(tokenizer(), capacity_bytes=100 * 2**20)
    try:
        compiled_word, compiled_number = compiler.compile(WORD), compiler.compile(number)
        compiled_word.held_bytes, compiled_number.held_bytes = 60 * 2**20, 30 * 2**20
        assert compiler.compile(WORD) is compiled_word
        assert compiler.compile(number) is compiled_number
        compiled_word.held_bytes = 80 * 2**20
        assert compiler.compile(number) is compiled_number
        assert compiler.compile(WORD) is not compiled_word
    finally:
        compiler.close()


def grow_lexers(count: int) -> tuple[int, list[int]]:
    """Use expressions whose lexers grow by 20 MB each. Return what the last held, and resident bytes after each."""
    text = tokenizer().tokenize_str("hello world, the quick brown fox jumps over the lazy dog. " * 5)
    compiler = GrammarCompiler(tokenizer())
    resident_bytes = []
    for number in range(count):
        grammar = compiler.compile(Structure(kind="regex", definition=f"(.*[a-m].{{{1500 + number}}}x)*"))
        written: list[int] = []
        state = follow(grammar, written)
        for token in text:
            written.append(token)
            state.masks(NO_DRAFT)
        resident_bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    compiler.close()
    return grammar.held_bytes, resident_bytes


def test_what_lexers_grow_to_is_counted_and_levels_off() -> None:
    """The compiler keeps about three of ten. In a process of its own, where nothing else takes memory or leaves it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        held_bytes, resident_bytes = process.submit(grow_lexers, 10).result()
    assert held_bytes > 2**23
    assert resident_bytes[-1] < max(resident_bytes[:5]) + 2**25


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9"', ["é"], ["u00e9"]),
        (r'root ::= "\U0001F600" [\u00e8-\u00ea]', ["😀é"], ["😀e"]),
        (r'root ::= "\x22\x5c\u005c\[x\]"', ['"\\\\[x]'], []),
        (r"root ::= [\u005d\x2d\x5e\u0000]+", ["]-^\0"], ["\\"]),
        (r'root ::= ["\\.]+ "." # "', ['".\\.'], ["x."]),
        ("root ::= . [&&~~]", ["\n&", "a~"], ["a", "aa"]),
        ("root ::= [^a]", ["\n", "é"], ["a"]),
        ('start: "\\u00e9" | /[\\u00e9]b/', ["é", "éb"], ["b"]),
    ],
)
def test_characters_by_their_number(grammar: str, right: list[str], wrong: list[str]) -> None:
    made = Grammar(Structure(kind="grammar", definition=grammar), tokenizer())
    assert [text for text in right if not matches(made, text)] == []
    assert [text for text in wrong if matches(made, text)] == []


def test_every_request_with_a_wrong_definition_is_told() -> None:
    compiler = GrammarCompiler(tokenizer())
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                compiler.compile(Structure(kind="regex", definition="(ab"))
    finally:
        compiler.close()


@pytest.mark.parametrize("step", ["1e29", "1e300", "1e-300"])
def test_steps_of_any_size_are_compiled_or_refused(step: str) -> None:
    definition = f'{{"type": "integer", "multipleOf": {step}}}'
    with suppress(InvalidRequestError):
        Grammar(Structure(kind="json", definition=definition), tokenizer())


@pytest.mark.parametrize("type_", ["", '"type": "integer", ', '"type": ["integer", "null"], '])
@pytest.mark.parametrize("literal", ['"enum": [-1e19, 3]', '"const": -1e29', '"enum": [{"a": [-9223372036854775808]}]'])
def test_literals_far_below_zero_are_refused(type_: str, literal: str) -> None:
    """llguidance ends the process at those of whole numbers."""
    with pytest.raises(InvalidRequestError, match="too far below zero"):
        Grammar(Structure(kind="json", definition=f"{{{type_}{literal}}}"), tokenizer())
