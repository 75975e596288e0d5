"""Parameters that are set on the console, and their checks."""

import pytest

from cli.console.conversation import Parameters, as_written
from decoding.errors import InvalidRequestError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("temperature", "0", 0),
        ("max_tokens", "7", 7),
        ("stop", "END", ["END"]),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("speculate", "off", False),
        ("speculate", "true", True),
        ("safety_identifier", "42", "42"),
    ],
)
def test_values_are_read_as_what_the_parameter_takes(name: str, text: str, value: object) -> None:
    parameters = Parameters(CompletionRequest)
    parameters.set(name, text)
    assert parameters.values == {name: value if name != "stop" or text.startswith("[") else text}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("temprature", "1", "did you mean 'temperature'"),
        ("max_tok", "1", "did you mean 'max_tokens'"),
        ("temperature", "warm", "temperature: should be a valid number, not 'warm'"),
        ("temperature", "-1", "temperature must be 0 \\(greedy\\) or"),
        ("top_p", "2", "top_p must be"),
        ("seed", "1.5", "seed: should be a valid integer"),
        ("model", "x", "the console sets it itself"),
        ("prompt", "x", "the console sets it itself"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(name: str, text: str, problem: str) -> None:
    parameters = Parameters(CompletionRequest)
    with pytest.raises(InvalidRequestError, match=problem):
        parameters.set(name, text)
    assert parameters.values == {}


def test_fields_are_checked_together() -> None:
    parameters = Parameters(ChatRequest)
    parameters.set("response_format", '{"type": "json_object"}')
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        parameters.set("ignore_eos", "true")
    assert parameters.values == {"response_format": {"type": "json_object"}}


def test_null_forgets() -> None:
    parameters = Parameters(ChatRequest)
    parameters.set("seed", "5")
    assert parameters.set("seed", "null") is None
    assert parameters.values == {}


def test_assignments() -> None:
    parameters = Parameters(ChatRequest)
    parameters.assign("stop = a=b")
    assert parameters.values == {"stop": "a=b"}
    with pytest.raises(InvalidRequestError, match="NAME=VALUE"):
        parameters.assign("temperature")


def test_every_parameter_is_described() -> None:
    described = dict(Parameters(ChatRequest).described())
    assert described["temperature"]
    assert not {"model", "messages", "stream"} & set(described)


@pytest.mark.parametrize(("value", "text"), [(True, "on"), (False, "off"), (None, "the default"), (["é"], '["é"]')])
def test_values_are_shown_as_they_are_written(value: object, text: str) -> None:
    assert as_written(value) == text
