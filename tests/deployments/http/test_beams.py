"""Beam search from the HTTP edge to a tiny model and back."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

BODY: dict[str, Any] = {"model": "consort", "prompt": "import os\nimport os", "max_tokens": 12, "seed": 3}


def ask(client: TestClient, **fields: object) -> Any:
    reply = client.post("/v1/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_n_best_with_their_scores(client: TestClient) -> None:
    answer = ask(client, use_beam_search=True, n=3, num_beams=4)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    scores = [choice["score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice["text"] for choice in choices}) > 1
    assert answer["usage"]["completion_tokens"] <= 36
    assert ask(client, use_beam_search=True, n=3, num_beams=4, seed=9)["choices"] == choices
    assert ask(client, n=1, num_beams=4)["choices"] == choices[:1]
    assert ask(client, n=3, best_of=4, use_beam_search=True)["choices"] == choices


def test_one_beam_is_greedy_decoding(client: TestClient) -> None:
    (searched,) = ask(client, use_beam_search=True, num_beams=1)["choices"]
    (greedy,) = ask(client, temperature=0)["choices"]
    assert searched.pop("score") < 0
    assert searched == greedy


def test_drawn_beams_follow_the_seed(client: TestClient) -> None:
    texts = [ask(client, num_beams=3, temperature=1.0, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_words_that_must_come(client: TestClient) -> None:
    answer = ask(client, num_beams=4, n=2, force_words=["class", ["return", "yield"]], max_tokens=16)
    for choice in answer["choices"]:
        assert "class" in choice["text"]
        assert "return" in choice["text"] or "yield" in choice["text"]


def test_every_prompt_has_its_answers(client: TestClient) -> None:
    prompts = ["import os", "def main():"]
    together = ask(client, prompt=prompts, num_beams=4, n=2)["choices"]
    alone = [choice for prompt in prompts for choice in ask(client, prompt=prompt, num_beams=4, n=2)["choices"]]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    assert [choice["index"] for choice in together] == [0, 1, 2, 3]


def test_a_stream_brings_whole_answers(client: TestClient) -> None:
    fields = {"num_beams": 4, "n": 2, "return_token_details": True}
    whole = ask(client, **fields)["choices"]
    with client.stream("POST", "/v1/completions", json={**BODY, **fields, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    assert [json.loads(line)["choices"][0] for line in lines] == whole


def test_conversations(client: TestClient) -> None:
    body = {"model": "consort", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "num_beams": 2}
    reply = client.post("/v1/chat/completions", json={**body, "n": 2})
    assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["length", "length"]


def test_log_probabilities_of_all_answers(client: TestClient) -> None:
    plain = ask(client, num_beams=4, n=2)["choices"]
    for choice, same in zip(ask(client, num_beams=4, n=2, logprobs=2)["choices"], plain, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == same["text"]
        assert sum(logprobs["token_logprobs"]) / len(logprobs["tokens"]) == pytest.approx(choice["score"], abs=1e-4)
        assert all(len(best) >= 2 for best in logprobs["top_logprobs"])


def test_structured_answers(client: TestClient) -> None:
    words = ["yes", "no", "perhaps"]
    choices = ask(client, num_beams=4, n=3, structured_outputs={"choice": words})["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    assert {choice["text"] for choice in choices} <= set(words)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 3, "num_beams": 2}, "n"),
        ({"prompt_logprobs": 1, "num_beams": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "num_beams": 2}, "echo"),
        ({"max_time": 1, "num_beams": 2}, "max_time"),
        ({"num_beams": 5}, "num_beams"),
    ],
)
def test_what_cannot_be_is_refused(client: TestClient, fields: dict[str, object], field: str) -> None:
    reply = client.post("/v1/completions", json={**BODY, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
