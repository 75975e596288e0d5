"""Request parameters over HTTP on tiny models: each has its effect, with drafts and without."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.testclient import TestClient

from deployments.endpoints.endpoint import ServedEndpoint

BODY: dict[str, Any] = {"model": "consort", "prompt": "import os\nimport os", "max_tokens": 24, "seed": 3}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMETERS: list[dict[str, object]] = [
    {"temperature": 0},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.0005},
    {"eta_cutoff": 0.0005},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1, "frequency_penalty": 0.5},
    {"temperature": 0, "no_repeat_ngram_size": 2},
    {"logit_bias": {"100": 8, "101": -100}},
    {"bad_words": ["import", "\n"]},
    {"allowed_token_ids": [50, 51, 52, 53]},
    {"suppress_tokens": [50, 51], "begin_suppress_tokens": [52]},
    {"forced_bos_token_id": 77, "forced_eos_token_id": 2},
    {"min_tokens": 20, "stop_token_ids": list(range(6, 1000))},
    {"ignore_eos": True},
    {"logprobs": 3, "echo": True},
    {"prompt_logprobs": 2, "n": 2},
    {"return_token_details": True},
    {"draft_length": 1},
    {"structured_outputs": {"regex": "[ab]{3,9}c"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
]


_UNTOLD = {"source", "proposer", "rank"}


def ask(client: TestClient, **fields: object) -> Any:
    reply = client.post("/v1/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def untold(value: Any) -> Any:
    """Drop what drafts may change: who proposed a token, and ranks among nearly equal tokens."""
    if isinstance(value, dict):
        return {name: untold(inner) for name, inner in value.items() if name not in _UNTOLD}
    return [untold(inner) for inner in value] if isinstance(value, list) else value


def rounded(value: Any) -> Any:
    """Make numbers approximate, because they differ slightly between batch shapes."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("fields", PARAMETERS, ids=lambda fields: "-".join(fields))
def test_drafts_change_nothing(client: TestClient, fields: dict[str, object]) -> None:
    drafted, plain = ask(client, **fields), ask(client, **fields, speculate=False)
    assert untold(drafted["choices"]) == rounded(untold(plain["choices"]))


def test_rejection_answers_too(client: TestClient) -> None:
    assert ask(client, verification="rejection")["usage"]["completion_tokens"] == 24


def tokens_of(client: TestClient, **fields: object) -> list[int]:
    (choice,) = ask(client, **fields, return_token_details=True)["choices"]
    return [detail["id"] for detail in choice["token_details"]]


def test_tokens_are_allowed_forced_and_forbidden(client: TestClient) -> None:
    allowed = tokens_of(client, allowed_token_ids=[50, 51, 52], forced_bos_token_id=99)
    assert allowed[0] == 99
    assert set(allowed[1:]) <= {50, 51, 52}
    assert set(tokens_of(client, allowed_token_ids=[50, 51], logit_bias={"50": -100})) == {51}
    assert set(tokens_of(client, allowed_token_ids=[50, 51], suppress_tokens=[51])) == {50}


def test_a_stop_token_ends_the_answer(client: TestClient, endpoints: dict[str, ServedEndpoint]) -> None:
    fields = {"allowed_token_ids": [50, 51], "min_tokens": 3, "stop_token_ids": [51], "max_tokens": 200}
    (choice,) = ask(client, **fields, return_token_details=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 51)
    assert [detail["id"] for detail in choice["token_details"]][-1] == 51
    assert len(choice["token_details"]) > 3
    (shown,) = ask(client, **fields, include_stop_str_in_output=True)["choices"]
    assert shown["text"] == choice["text"] + endpoints["consort"].token_decoder.text_of(51)


def test_json_answers_validate(client: TestClient) -> None:
    answer_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    (choice,) = ask(client, response_format=answer_format, max_tokens=200)["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_max_time_ends_an_answer(client: TestClient) -> None:
    (choice,) = ask(client, max_time=0.02, max_tokens=1000, ignore_eos=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "max_time")


def test_logprobs_of_the_prompt_and_of_the_answer_are_the_same(client: TestClient) -> None:
    """The log-probabilities of an answer agree with those of the same tokens as a prompt."""
    (first,) = ask(client, logprobs=2, return_token_details=True)["choices"]
    prompt = client.post("/tokenize", json={"model": "consort", "prompt": BODY["prompt"]}).json()["tokens"]
    answer = [detail["id"] for detail in first["token_details"]]
    (again,) = ask(client, prompt=prompt + answer, max_tokens=0, echo=True, logprobs=2)["choices"]
    assert again["logprobs"]["token_logprobs"][len(prompt) :] == pytest.approx(
        first["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert again["logprobs"]["tokens"][len(prompt) :] == first["logprobs"]["tokens"]
