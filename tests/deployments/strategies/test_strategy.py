"""What is an answer within a text, and what can't hold the server up."""

import time

import pytest

from decoding.errors import ConfigError
from deployments.configuration.values import load_callable
from deployments.strategies.strategy import by_json_field, by_regex, whole_text


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"answer is (-?\d+)", "The answer is 4, no: the answer is 12.", "12"),
        (r"\d+", "1 2 34", "34"),
        (r"(?i)(yes|no)", "Well, No.", "No"),
        (r"answer: (.*)", "answer:   two\twords ", "two words"),
        (r"(a)?b", "b", None),
        (r"x", "nothing", None),
        (r"(\w+)", "w" * 2000, None),
    ],
)
def test_regular_expressions(pattern: str, text: str, expected: str | None) -> None:
    assert by_regex(pattern, key="k")(text) == expected


@pytest.mark.parametrize("pattern", ["(", r"(a)(?=b)", r"(a)\1", "((a{1,100}){1,100}){1,100}", "x" * 1001])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.e\.strategy\.regex"):
        by_regex(pattern, key="endpoints.e.strategy.regex")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){12}", r"^(\w+\s?)*$"])
def test_no_text_holds_a_pattern_up(pattern: str) -> None:
    began_s = time.process_time()
    by_regex(pattern, key="k")("a" * 20_000 + "!")
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("answer", 'so: {"answer": 3}', "3"),
        ("answer", '{"answer": "first"} {"answer": " the  last "} {broken', "the last"),
        ("a.b", '{"a": {"b": [1, {"y": 2, "x": 1}]}}', '[1, {"x": 1, "y": 2}]'),
        ("answer", '{"other": 1}', None),
        ("answer", "[1]", None),
        ("a.b", '{"a": 3}', None),
        ("answer", "{" * 50_000, None),
        ("answer", '{"answer":' * 50_000, None),
    ],
)
def test_json_fields(path: str, text: str, expected: str | None) -> None:
    assert by_json_field(path)(text) == expected


def test_whole_texts_differ_by_more_than_white_space() -> None:
    assert whole_text(" a\n b ") == "a b"
    assert whole_text("  ") is None


def test_utilities_are_loaded_by_name() -> None:
    assert load_callable("difflib:get_close_matches", key="k") is not None
    with pytest.raises(ConfigError, match="k: can't load 'nowhere:f'"):
        load_callable("nowhere:f", key="k")
    with pytest.raises(ConfigError, match="k: 'math:pi' is a float"):
        load_callable("math:pi", key="k")
