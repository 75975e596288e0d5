"""Request parameters by the official client on the bundled models, as documented by OpenAI or vLLM."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.server.conftest import Server

pytestmark = pytest.mark.cluster

PROMPT = "def read_lines(path):\n"
MESSAGES = [{"role": "user", "content": "What does close in the module socket do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "known": {"type": "boolean"}},
    "required": ["name", "known"],
    "additionalProperties": False,
}


def complete(client: Any, **fields: Any) -> Any:
    ours = {name: fields.pop(name) for name in list(fields) if name in OURS}
    options = {"model": "consort", "prompt": PROMPT, "max_tokens": 24, "seed": 5, **fields}
    return client.completions.create(**options, extra_body=ours)


OURS = {"speculate", "top_k", "min_p", "structured_outputs", "return_token_details", "prompt_logprobs", "verification"}


def test_choices_and_their_log_probabilities(client: Any) -> None:
    answer = complete(client, n=3, logprobs=2, temperature=1.0)
    assert len({choice.text for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    best = complete(client, n=1, best_of=3, temperature=1.0)
    means = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in answer.choices]
    assert best.choices[0].text == answer.choices[means.index(max(means))].text


def test_a_greedy_token_is_the_most_probable_one(client: Any) -> None:
    options = {"model": "consort", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    chat = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    for token in chat.choices[0].logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4)
    text = bytes(byte for token in chat.choices[0].logprobs.content for byte in token.bytes).decode()
    assert text.removesuffix("<|end|>") == chat.choices[0].message.content


def test_an_echoed_prompt_is_scored(client: Any) -> None:
    echoed = complete(client, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert echoed.text == PROMPT
    assert echoed.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in echoed.logprobs.token_logprobs[1:])


def test_json_follows_its_schema_with_drafts_and_without(client: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    options = {"model": "consort", "messages": MESSAGES, "seed": 7, "response_format": response_format}
    drafted = client.chat.completions.create(**options, max_tokens=200)
    plain = client.chat.completions.create(**options, max_tokens=200, extra_body={"speculate": False})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(drafted.choices[0].message.content), SCHEMA)


def test_other_structures(client: Any) -> None:
    assert complete(client, structured_outputs={"choice": ["red", "green"]}).choices[0].text in ("red", "green")
    assert complete(client, structured_outputs={"regex": "[0-9]{4}"}).choices[0].text.isdigit()
    grammar = 'start: "a" ("b" | "c") "d"'
    assert complete(client, structured_outputs={"grammar": grammar}).choices[0].text in ("abd", "acd")


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_token_details_add_up_and_tell_what_was_accepted(client: Any, verification: str) -> None:
    answer = complete(client, return_token_details=True, verification=verification, max_tokens=60)
    (choice,) = answer.choices
    details = choice.model_extra["token_details"]
    assert "".join(detail["text"] for detail in details) == choice.text
    accepted = sum(detail["source"] == "accepted" for detail in details)
    assert accepted == answer.model_extra["speculation"]["accepted"]


def test_a_response_streams(client: Any) -> None:
    options = {"model": "consort", "input": MESSAGES[0]["content"], "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**options)
    deltas = [event.delta for event in client.responses.create(**options, stream=True) if hasattr(event, "delta")]
    assert "".join(deltas) == whole.output_text


def test_other_routes(server: Server) -> None:
    assert server.client.get("/ready").status == 200
    assert server.client.get("/version").document["version"]
    assert server.client.get("/openapi.json").document["paths"].keys() >= {"/v1/responses", "/tokenize"}
