"""Prompts from templates, over the fake coordinator."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from decoding.errors import ConfigError
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import Scripted

TEMPLATES = {
    "summarise": "Summarise {{ text }} in {{ words }} words.",
    "sentiment": "Text: {{ text }}\nMood: ",
    "shots": "{% for shot in examples %}{{ shot.text }} -> {{ shot.answer }}\n{% endfor %}{{ text }} ->",
    "evil": "{{ text.__class__.__mro__ }}",
}
EXAMPLES = [{"variables": {"text": "fine"}, "answer": "good"}, {"variables": {"text": "awful"}, "answer": "bad"}]

Sides = tuple[TestClient, FakeCoordinator, ServedEndpoint]


@pytest.fixture
def sides(with_tools: dict[str, ServedEndpoint]) -> Iterator[Sides]:
    coordinator: Any = Scripted()
    with TestClient(make_api(Service(with_tools, coordinator, templates=TEMPLATES))) as client:
        yield client, coordinator, with_tools["consort"]


def prompt_of(sides: Sides, path: str, **fields: Any) -> str:
    client, coordinator, endpoint = sides
    response = client.post(path, json={"model": "consort", "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    return endpoint.token_decoder.decode(list(coordinator.requests[-1].prompt))


def test_a_completion_from_a_template_is_that_of_its_text(sides: Sides) -> None:
    variables = {"text": "this", "words": 3}
    written = prompt_of(sides, "/v1/completions", template="summarise", variables=variables, prompt=None)
    assert written == prompt_of(sides, "/v1/completions", prompt="Summarise this in 3 words.")


def test_examples_come_before_the_prompt(sides: Sides) -> None:
    fields = {"variables": {"text": "meh"}, "examples": EXAMPLES}
    written = prompt_of(sides, "/v1/completions", template="sentiment", **fields)
    assert written == "Text: fine\nMood: good\n\nText: awful\nMood: bad\n\nText: meh\nMood: "
    shots = prompt_of(sides, "/v1/completions", template="shots", **fields)
    assert shots == "fine -> good\nawful -> bad\nmeh ->"


def test_a_chat_has_examples_as_turns(sides: Sides) -> None:
    system = {"role": "system", "content": "Be brief."}
    fields = {"template": "sentiment", "variables": {"text": "meh"}, "examples": EXAMPLES[:1]}
    turns = [
        system,
        {"role": "user", "content": "Text: fine\nMood: "},
        {"role": "assistant", "content": "good"},
        {"role": "user", "content": "Text: meh\nMood: "},
    ]
    path = "/v1/chat/completions"
    assert prompt_of(sides, path, messages=[system], **fields) == prompt_of(sides, path, messages=turns)
    assert prompt_of(sides, path, **fields) == prompt_of(sides, path, messages=turns[1:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "summarise", "variables": {"text": "x"}}, "variables.words: is required by the template 'summ"),
        ({"template": "summarise"}, "variables.text: is required by the template 'summarise'"),
        ({"template": "sentiment", "variables": {"txet": "x"}}, "variables.txet: is no variable of the template"),
        ({"template": "sumarise"}, "template: there is no template 'sumarise'; did you mean 'summarise'?"),
        ({"template": "sentiment", "variables": {"text": "x"}, "prompt": "y"}, "prompt: has no place beside template"),
        ({"variables": {"text": "x"}, "prompt": "y"}, "variables: needs a template"),
        ({}, "prompt: is required"),
        (
            {"template": "sentiment", "variables": {"text": "x"}, "examples": [{"variables": {}, "answer": "y"}]},
            "examples.0.variables.text: is required",
        ),
        ({"template": "evil", "variables": {"text": "x"}}, "variables: the template 'evil' can't use them: access to"),
    ],
)
def test_what_is_wrong_is_named(sides: Sides, fields: dict[str, Any], message: str) -> None:
    response = sides[0].post("/v1/completions", json={"model": "consort", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_the_server_lists_its_templates(sides: Sides) -> None:
    cards = sides[0].get("/v1/templates").json()["data"]
    assert [(card["id"], card["variables"]) for card in cards[:3]] == [
        ("summarise", ["text", "words"]),
        ("sentiment", ["text"]),
        ("shots", ["examples", "text"]),
    ]
    assert cards[0]["template"] == TEMPLATES["summarise"]


@pytest.mark.parametrize("source", ["{{ text ", "{{ text | uper }}"])
def test_a_broken_template_is_an_error_of_the_configuration(source: str) -> None:
    data = {
        "models": {"m": {"path": str(ROOT / "models" / "target")}},
        "endpoints": {"e": {"target": "m"}},
        "templates": {"broken": source},
    }
    with pytest.raises(ConfigError, match=r"^templates\.broken: is no Jinja template: line 1"):
        parse_config(data, folder=ROOT)
