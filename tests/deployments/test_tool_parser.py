"""Calls are found in texts, however these are cut into pieces, and nothing else is lost."""

import json

import pytest

from deployments.answers.tool_format import ToolFormat, tool_format
from deployments.answers.tool_parser import ToolParser

CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
OTHER = '{"name": "time", "parameters": {}}'
CASES: list[tuple[ToolFormat, str, str, list[str]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
    (
        "hermes",
        f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>",
        "Let me see.",
        ["weather", "time"],
    ),
    ("hermes", f"<tool_call>\n{CALL}", "", ["weather"]),
    ("hermes", "a < b and <tool> is none", "a < b and <tool> is none", []),
    ("hermes", "<tool_call>no JSON</tool_call> after", "<tool_call>no JSON</tool_call> after", []),
    ("mistral", f" [{CALL}, {OTHER}]", "", ["weather", "time"]),
    ("mistral", "[1, 2] is a list", "[1, 2] is a list", []),
    ("llama", f"{CALL}; {OTHER}", "", ["weather", "time"]),
    ("llama", "A plain answer with {braces}", "A plain answer with {braces}", []),
    ("llama", '{"name": 3}', '{"name": 3}', []),
]


def parse(form: ToolFormat, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(form)
    pieces = [parser.add(text[at : at + size], last=at + size >= len(text)) for at in range(0, len(text), size)]
    calls = [(call.name, call.arguments) for piece in pieces for call in piece.calls]
    return "".join(piece.content for piece in pieces), calls


@pytest.mark.parametrize(("form", "text", "content", "names"), CASES)
def test_calls_are_found_in_pieces_of_any_size(form: ToolFormat, text: str, content: str, names: list[str]) -> None:
    whole = parse(form, text, len(text))
    assert (whole[0].rstrip(), [name for name, _ in whole[1]]) == (content, names)
    for size in range(1, len(text)):
        pieces, calls = parse(form, text, size)
        assert (pieces.rstrip(), calls) == (content, whole[1])
    for name, arguments in whole[1]:
        assert json.loads(arguments) == ({"city": "Zürich"} if name == "weather" else {})


def test_a_forced_answer_is_all_call() -> None:
    named = ToolParser("hermes", must_call=True, name="weather")
    assert not named.add('{"city"', last=False).calls
    (call,) = named.add(': "Bern"}', last=True).calls
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    (first, second) = ToolParser(None, must_call=True).add(f"[{CALL}, {CALL}]", last=True).calls
    assert first.id != second.id
    assert len(first.id) == 9
    assert first.id.isalnum()


def test_formats_follow_from_templates() -> None:
    assert tool_format("… <tool_call> …") == "hermes"
    assert tool_format("… [TOOL_CALLS] …") == "mistral"
    assert tool_format("… <|python_tag|> …") == "llama"
    assert tool_format("{% for message in messages %}") is None
    assert tool_format(None) is None
