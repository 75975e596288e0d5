"""Tool calls are parsed however the text is split, emitted early, and no content is lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.apis.events import Arguments, Call, Event, Text
from deployments.apis.formats import ToolFormat, tool_format
from deployments.apis.tool_calls import ToolCallParser

ARGUMENTS = r'{"city": "Zürich", "say": "\"}</tool_call>", "x": [1, {"y": null}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "time", "parameters": {}}'
BOTH = [("weather", ARGUMENTS), ("time", "{}")]
CASES: list[tuple[ToolFormat | None, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", BOTH[:1]),
    ("hermes", f"Wait.\n<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "Wait.", BOTH),
    ("hermes", f"<tool_call>\n{CALL}", "", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n and on ", "and on ", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", "", BOTH[:1]),  # a brace too many
    ("hermes", f"<tool_call>{OTHER[:-1]}</tool_call>.<tool_call>{CALL}", ".", BOTH[::-1]),  # one too few
    ("hermes", f"<tool_call>{CALL}<tool_call>{OTHER}</tool_call>", "", BOTH),  # a tag too few
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>.', ".", [("f", '{"x": 1')]),
    ("hermes", "a < b and <tool> is none", "a < b and <tool> is none", []),
    ("hermes", "<tool_call>no JSON</tool_call> after", "<tool_call>no JSON</tool_call> after", []),
    ("hermes", 'cut off <tool_call>{"name": "f"', 'cut off <tool_call>{"name": "f"', []),
    ("mistral", f" [{CALL}, {OTHER}]", "", BOTH),
    ("mistral", f"[{CALL}] and more", "and more", BOTH[:1]),
    ("mistral", "[1, 2] is a list", "[1, 2] is a list", []),
    ("llama", f"{CALL}; {OTHER}", "", BOTH),
    ("llama", r'{"parameters": "{\"x\": 1}", "id": 3, "name": "f"}', "", [("f", '{"x": 1}')]),
    ("llama", '{"name": "f", "arguments": 5}', "", [("f", "5")]),
    ("llama", "A plain answer with {braces}", "A plain answer with {braces}", []),
    ("llama", '{"name": 3}', '{"name": 3}', []),
    (None, f"<tool_call>{CALL}", f"<tool_call>{CALL}", []),
]


def parse(parser: ToolCallParser, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and names and arguments of calls."""
    content, calls = "", list[tuple[str, str]]()
    for start in range(0, max(1, len(text)), size):
        for event in parser.add(text[start : start + size], last=start + size >= len(text)):
            match event:
                case Text(piece):
                    content += piece
                case Call(name):
                    calls.append((name, ""))
                case Arguments(piece):
                    calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_in_pieces_of_any_size(
    form: ToolFormat | None, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in range(1, len(text) + 1):
        assert parse(ToolCallParser(form), text, size) == (content, calls), size


SNIPPETS = ["<tool_call>", "</tool_call>", CALL, OTHER, *'{}[]":,;\\ \n', "name", '"name": ', '"arguments": ', "x", "1"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join),
    size=st.integers(1, 9),
    form=st.sampled_from(["hermes", "mistral", "llama"]),
)
def test_whatever_comes_is_read_alike_whole_and_in_pieces(text: str, size: int, form: ToolFormat) -> None:
    assert parse(ToolCallParser(form), text, size) == parse(ToolCallParser(form), text, len(text) or 1)


def test_arguments_are_told_as_they_come() -> None:
    parser = ToolCallParser("hermes")
    text = f"<tool_call>{CALL}</tool_call>"
    begins = text.index(ARGUMENTS)
    events: list[Event] = []
    lengths = [0]
    for index, character in enumerate(text):
        events += parser.add(character, last=index + 1 == len(text))
        lengths.append(sum(len(event.text) for event in events if isinstance(event, Arguments)))
    assert isinstance(events[0], Call)
    assert lengths[begins + 1] == 1
    assert all(later == earlier + 1 for earlier, later in pairwise(lengths[begins : begins + len(ARGUMENTS) + 1]))


def test_a_forced_answer_is_all_call() -> None:
    named = ToolCallParser("hermes", must_call=True, name="weather")
    start, first = named.add('{"city"', last=False)
    assert (start, first) == (Call("weather", start.id), Arguments('{"city"'))  # type: ignore[union-attr]
    assert named.add(': "Bern"}', last=True) == [Arguments(': "Bern"}')]
    events = ToolCallParser(None, must_call=True).add(f"[{CALL}, {CALL}]", last=True)
    ids = [event.id for event in events if isinstance(event, Call)]
    assert len(set(ids)) == 2
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert json.loads("".join(event.text for event in events[:2] if isinstance(event, Arguments)))["city"] == "Zürich"


@pytest.mark.parametrize("tool_format", [None, "hermes"])
def test_a_forced_call_that_was_cut_off_is_no_content(tool_format: ToolFormat | None) -> None:
    text = f"[{CALL}, {CALL}]"
    for end in range(1, len(text)):
        parser = ToolCallParser(tool_format, must_call=True)
        events = [each for index in range(end) for each in parser.add(text[index], last=index + 1 == end)]
        whole = ToolCallParser(tool_format, must_call=True).add(text[:end], last=True)
        assert {type(each) for each in (*events, *whole)} <= {Call, Arguments}
        starts = [[each.name for each in some if isinstance(each, Call)] for some in (events, whole)]
        begun = [text[:end].count('"weather", "arguments": {')] * 2
        assert [*map(len, starts)] == begun


def test_formats_follow_from_templates() -> None:
    assert tool_format("… <tool_call> …") == "hermes"
    assert tool_format("… [TOOL_CALLS] …") == "mistral"
    assert tool_format("… <|python_tag|> …") == "llama"
    assert tool_format("{% for message in messages %}") is None
    assert tool_format(None) is None
