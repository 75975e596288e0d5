"""Reasoning is told apart from the answer, in the formats that tokenizers declare and in those of older models."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.response_templates import load_response_template

from deployments.apis.events import AnswerParser, Arguments, Call, Reasoning, Text
from deployments.apis.formats import kept_tokens, response_template
from deployments.apis.parser import ReasoningParser, TemplateParser
from deployments.apis.tool_calls import ToolCallParser
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.endpoints.loading import load_endpoints

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = ("weather", {"city": "Bern\nUlm", "days": 3})


def parse(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the content, and names and arguments of calls."""
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for start in range(0, max(1, len(text)), size):
        for event in parser.add(text[start : start + size], last=start + size >= len(text)):
            match event:
                case Reasoning(piece):
                    reasoning += piece
                case Call(name):
                    calls.append((name, ""))
                case Arguments(piece):
                    calls[-1] = (calls[-1][0], calls[-1][1] + piece)
                case Text(piece):
                    content += piece
    return reasoning, content, calls


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        ("<think>\nSo  be it.\n</think>\n\nYes.\n", False, "So  be it.", "Yes.\n"),
        ("So be it.\n</think>Yes.", True, "So be it.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("\n</think>", True, "", ""),
        ("Never ends </thin", True, "Never ends </thin", ""),
        (" Yes <think>no</think>", False, "", " Yes <think>no</think>"),
        ("<thin ice", False, "", "<thin ice"),
        ("<th", False, "", "<th"),
        ("<think>a < b </think> c", False, "a < b", "c"),
    ],
)
def test_think_tags_in_pieces_of_any_size(text: str, has_begun: bool, reasoning: str, content: str) -> None:
    for size in range(1, len(text) + 1):
        parser = ReasoningParser(ToolCallParser(None), has_begun=has_begun)
        assert parse(parser, text, size) == (reasoning, content, []), size


def test_calls_follow_reasoning() -> None:
    text = 'Hm.</think>\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for size in range(1, len(text) + 1):
        parser = ReasoningParser(ToolCallParser("hermes"), has_begun=True)
        assert parse(parser, text, size) == ("Hm.", "", [("weather", "{}")])


QWEN = (
    "… <function= …",
    "<|im_start|>assistant\n<think>\n",
    "I ask.\n</think>\n\nWait.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\nUlm\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
)
GLM = (
    "… <arg_key> …",
    "<|user|>\nhi<|assistant|>",
    "<think>I ask.</think>\nWait.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\nUlm</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
)
DEEPSEEK = (
    "… <｜tool▁call▁begin｜> …",  # noqa: RUF001
    "<｜User｜>hi<｜Assistant｜><think>\n",  # noqa: RUF001
    "I ask.\n</think>\n\nWait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"  # noqa: RUF001
    '```json\n{"city": "Bern\\nUlm", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
)
GPT_OSS = (
    "… <|channel|>analysis …",
    "<|start|>user<|message|>hi<|end|><|start|>assistant",
    "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bern\\nUlm", "days": 3}<|call|>',
)


def template_parser(chat_template: str, prompt: str, *, reads_calls: bool = True) -> TemplateParser:
    tokenizer: Any = load_endpoints(load_config(TINY_CONFIG))["consort"].encoder.tokenizer
    tokenizer.chat_template = chat_template
    template = response_template(tokenizer)
    assert template is not None
    return TemplateParser(template, prompt, TOOLS, reads_calls=reads_calls)


@pytest.mark.parametrize(("chat_template", "prompt", "text"), [QWEN, GLM, DEEPSEEK, GPT_OSS])
def test_formats_of_known_models(chat_template: str, prompt: str, text: str) -> None:
    template = template_parser(chat_template, prompt)._template
    for size in (1, 2, 3, 5, 8, 13, len(text)):
        parser = TemplateParser(template, prompt, TOOLS, reads_calls=True)
        reasoning, content, calls = parse(parser, text, size)
        assert (reasoning, content) == ("I ask.", "Wait."), size
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [CALL]


DECLARED: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {"open": "[CALL]", "close": "[/CALL]", "content": "json", "repeats": True},
        "content": {},
    },
}


def test_a_call_that_is_no_json_is_content() -> None:
    template = load_response_template(DECLARED)
    for text, content in (("[CALL]{no[/CALL] after", "{noafter"), ('[CALL]{"name": "f"', '{"name": "f"')):
        for size in range(1, len(text) + 1):
            parser = TemplateParser(template, "", (), reads_calls=True)
            assert parse(parser, text, size) == ("", content, [])
    parser = TemplateParser(template, "", (), reads_calls=False)
    assert parse(parser, '[CALL]{"name": "f"}[/CALL]', 3) == ("", '{"name": "f"}', [])


SNIPPETS = ["[THINK]", "[/THINK]", "[CALL]", "[/CALL]", '{"name": "f", "arguments": {}}', " ", "\n", "x", "[", "]"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(SNIPPETS), max_size=10).map("".join), size=st.integers(1, 9))
def test_whatever_comes_is_read_alike_whole_and_in_pieces(text: str, size: int) -> None:
    template = load_response_template(DECLARED)
    whole, pieces = (
        parse(TemplateParser(template, "", (), reads_calls=True), text, step) for step in (len(text) or 1, size)
    )
    assert whole == pieces


def test_special_tokens_of_the_template_stay_in_the_text() -> None:
    endpoint = load_endpoints(load_config(TINY_CONFIG))["consort"]
    tokenizer: Any = endpoint.encoder.tokenizer
    template = load_response_template({**DECLARED, "fields": {"content": {"open_pattern": r"<\|user\|>"}}})
    assert kept_tokens(template, tokenizer) == {tokenizer.convert_tokens_to_ids("<|user|>")}
