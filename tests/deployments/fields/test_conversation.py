"""Forced calls follow their functions' schemas, whose references mean what they mean in the schema alone."""

import json
from typing import Any

import pytest

from decoding.sampling.params import Structure
from deployments.apis.chat.request import ChatRequest
from deployments.apis.messages.request import MessagesRequest
from deployments.apis.responses.request import ResponsesRequest
from tests.support.structures import compiled, matches

ITEM: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
WORD: dict[str, Any] = {"type": "string", "maxLength": 3}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def chat(tools: dict[str, Any], choice: object = "required") -> Structure | None:
    functions = [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": functions, "tool_choice": choice}
    return ChatRequest.model_validate(body).structure


def allowed(tools: dict[str, Any]) -> Structure | None:
    names = [{"type": "function", "function": {"name": name}} for name in tools]
    return chat(tools, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}})


def responses(tools: dict[str, Any]) -> Structure | None:
    functions = [{"type": "function", "name": name, "parameters": tools[name]} for name in tools]
    return ResponsesRequest.model_validate({"input": "x", "tools": functions, "tool_choice": "required"}).structure


def messages(tools: dict[str, Any]) -> Structure | None:
    functions = [{"name": name, "input_schema": tools[name]} for name in tools]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": functions, "tool_choice": {"type": "any"}}
    return MessagesRequest.model_validate(body).structure


def allows(structure: Structure | None, name: str, arguments: object) -> bool:
    assert structure is not None
    call = {"name": name, "arguments": arguments}
    return matches(
        compiled("json", structure.definition), json.dumps([call], separators=(",", ":"), ensure_ascii=False)
    )


@pytest.mark.parametrize("ask", [chat, allowed, responses, messages])
@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_definitions_of_the_same_name_stay_apart(ask: Any, key: str) -> None:
    references = {"x": {"$ref": f"#/{key}/I"}, "y": {"$ref": "#/properties/x"}}
    tools = {"f": closed(references, **{key: {"I": ITEM}}), "g": closed(references, **{key: {"I": WORD}})}
    structure = ask(tools)
    items: list[dict[str, Any]] = [{"x": {"n": 1}}, {"y": {"n": 1}}, {"x": {}, "y": {}}]
    for arguments in items:
        assert allows(structure, "f", arguments)
        assert not allows(structure, "g", arguments)
    words: list[dict[str, Any]] = [{"x": "abc"}, {"y": ""}]
    for arguments in words:
        assert allows(structure, "g", arguments)
        assert not allows(structure, "f", arguments)
    assert not allows(structure, "g", {"x": "abcd"})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (closed({"a": {"$ref": "#"}}), {"a": {"a": {}}}, {"a": [{"name": "f", "arguments": {}}]}),
        ({"$ref": "#/$defs/T", "$defs": {"T": closed({"t": {"$ref": "#/$defs/T"}})}}, {"t": {"t": {}}}, {"t": 1}),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/T",
                "definitions": {"T": closed({"t": {"type": "array", "items": {"$ref": "#/definitions/T"}}})},
            },
            {"t": [{}, {"t": []}]},
            {"t": [1]},
        ),
        (
            closed(
                {"a": {"$ref": "#/definitions/I"}},
                definitions={"I": WORD},
                **{"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://example.com/root.json"},
            ),
            {"a": "b"},
            {"a": 1},
        ),
        (
            {"allOf": [{"required": ["a"]}], "$ref": "#/$defs/T", "$defs": {"T": closed({"a": {"$ref": "#/allOf/0"}})}},
            {"a": {"a": 1}},
            {},
        ),
        (closed({"a": {"$ref": "#word"}}, **{"$defs": {"W": {"$anchor": "word", **WORD}}}), {"a": "b"}, {"a": 1}),
        (closed({"a": {"$ref": "W"}}, **{"$id": "T", "$defs": {"W": {"$id": "W", **WORD}}}), {"a": "b"}, {"a": 1}),
        (closed({"a": {"$ref": "T#/$defs/W"}}, **{"$id": "T", "$defs": {"W": WORD}}), {"a": "b"}, {"a": 1}),
        (
            closed(
                {"a": {"$ref": "https://e.com/s.json#/$defs/W"}},
                **{"$id": "https://e.com/s.json", "$defs": {"W": WORD}},
            ),
            {"a": "b"},
            {"a": 1},
        ),
        (closed({"a/b": WORD, "c": {"$ref": "#/properties/a~1b"}}), {"c": "b"}, {"c": 1}),
        (closed({"a é": WORD, "c": {"$ref": "#/properties/a%20%C3%A9"}}), {"c": "b"}, {"c": 1}),
        (
            closed(
                {"p": {"items": {"$ref": "#/$defs/A"}}},
                **{"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}, WORD]}, "B": ITEM}},
            ),
            {"p": ["a", {"n": 1}]},
            {"p": [1]},
        ),
    ],
    ids=json.dumps,
)
def test_a_schema_means_the_same_in_a_call_and_alone(schema: dict[str, Any], right: object, wrong: object) -> None:
    other = closed({"x": {"$ref": "#/$defs/T"}}, **{"$defs": {"T": {"const": 1}, "W": {"const": 1}, "I": {"const": 1}}})
    forced = chat({"f": schema, "other": other})
    named = chat({"f": schema, "other": other}, {"type": "function", "function": {"name": "f"}})
    assert named is not None
    for arguments, fine in ((right, True), (wrong, False)):
        assert allows(forced, "f", arguments) == fine
        text = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
        assert matches(compiled("json", named.definition), text) == fine
    assert not allows(forced, "other", right)


def test_two_functions_that_give_themselves_one_name_stay_apart() -> None:
    named = {"$id": "https://example.com/arguments.json"}
    tools = {
        "f": closed({"x": {"$ref": "#/$defs/I"}}, **named, **{"$defs": {"I": ITEM}}),
        "g": closed({"x": {"$ref": "#/$defs/I"}}, **named, **{"$defs": {"I": WORD}}),
    }
    structure = chat(tools)
    assert allows(structure, "f", {"x": {"n": 1}})
    assert allows(structure, "g", {"x": "a"})
    assert not allows(structure, "f", {"x": "a"})


def test_forced_calls_have_no_blanks() -> None:
    for structure in (chat({"f": ITEM}), chat({"f": ITEM}, {"type": "function", "function": {"name": "f"}})):
        assert structure is not None
        grammar = compiled("json", structure.definition)
        text = '[{"name":"f","arguments":{"n":1}}]' if structure == chat({"f": ITEM}) else '{"n":1}'
        assert matches(grammar, text)
        for index in range(1, len(text)):
            assert not matches(grammar, text[:index] + " " + text[index:])
