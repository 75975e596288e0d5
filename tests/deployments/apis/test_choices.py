"""Whole and streamed answers of the fake coordinator: choices, log-probabilities, sources, finish reasons."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from actors.coordinator.request import Delta, Request
from actors.wire.messages import MemberShare
from decoding.drafts.prediction import Alignment
from decoding.sampling.noise_keys import choice_seed
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator, fake_logprobs
from tests.deployments.fake_coordinator import answer as scripted_answer

BODY: dict[str, Any] = {"model": "consort", "prompt": "import os", "max_tokens": 12, "seed": 1}
CHAT: dict[str, Any] = {
    "model": "consort",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 12,
    "seed": 1,
}


def complete(fake: TestClient, **fields: object) -> Any:
    reply = fake.post("/v1/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(fake: TestClient, **fields: object) -> Any:
    reply = fake.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(fake: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    reply = fake.post(path, json={**body, "stream": True})
    *chunks, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_choices_are_numbered_prompt_by_prompt_and_have_seeds_of_their_own(
    fake: TestClient, coordinator: FakeCoordinator
) -> None:
    answer = complete(fake, prompt=["a", "b"], n=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [request.params.seed for request in coordinator.requests] == [choice_seed(1, i) for i in (0, 1, 2)] * 2
    assert len({tuple(request.prompt) for request in coordinator.requests[:3]}) == 1
    alone = complete(fake, prompt="b", n=2)
    assert [choice["text"] for choice in alone["choices"]] == [choice["text"] for choice in answer["choices"][3:5]]
    first, second = (len(coordinator.requests[i].prompt) for i in (0, 3))
    assert answer["usage"] == {
        "prompt_tokens": first + second,
        "completion_tokens": 72,
        "total_tokens": first + second + 72,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_tokens_of_a_prediction_are_counted(fake: TestClient, coordinator: FakeCoordinator) -> None:
    """As OpenAI defines them: those that appeared in the answer, and the others."""
    content = chat(fake)["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": content}, {"type": "text", "text": " It rained."}]
    for predicted in (content, parts, "It rained."):
        details = chat(fake, prediction={"type": "content", "content": predicted}, n=2)["usage"][
            "completion_tokens_details"
        ]
        first, second = coordinator.requests[-2:]
        alignments = [Alignment(first.prediction), Alignment(second.prediction)]
        for alignment, request in zip(alignments, (first, second), strict=True):
            alignment.follow([token for delta in scripted_answer(request) for token in delta.token_ids])
        accepted = sum(alignment.matched for alignment in alignments)
        assert details["accepted_prediction_tokens"] == accepted
        assert details["rejected_prediction_tokens"] == 2 * len(first.prediction) - accepted
        assert (accepted > 0) == (predicted != "It rained.")


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("a text", "prediction"),
        ({"type": "file", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}, "prediction.content.0.type"),
        ({"type": "content", "content": "a" * 1_000_000}, "prediction.content"),
    ],
)
def test_a_wrong_prediction_is_refused(fake: TestClient, prediction: object, field: str) -> None:
    reply = fake.post("/v1/chat/completions", json={**CHAT, "prediction": prediction})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_best_of_returns_the_likeliest(fake: TestClient) -> None:
    every = complete(fake, n=5, logprobs=0)["choices"]
    best = complete(fake, n=2, best_of=5)
    means = [sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in every]
    ranked = sorted(range(5), key=lambda i: -means[i])
    assert [choice["text"] for choice in best["choices"]] == [every[i]["text"] for i in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 60


class Blended(FakeCoordinator):
    """Gives every answer a member that is named after the answer's seed."""

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        members = [MemberShare(str(request.params.seed), weight=1, tokens=12, agreement=1, latency_s=0)]
        super().submit(request, lambda delta: sink(replace(delta, members=members)))


def test_best_of_tells_who_made_the_answers_that_it_returns(endpoints: dict[str, ServedEndpoint]) -> None:
    coordinator: Any = Blended()
    with TestClient(make_api(Service(endpoints, coordinator))) as client:
        answers = [complete(client, n=4), complete(client, n=2, best_of=4)]
    every, best = (
        [(choice["text"], choice["ensemble"]["members"][0]["model"]) for choice in answer["choices"]]
        for answer in answers
    )
    assert best != every[:2]
    assert set(best) <= set(every)


def test_a_completions_logprobs(fake: TestClient, endpoints: dict[str, ServedEndpoint]) -> None:
    (choice,) = complete(fake, logprobs=3)["choices"]
    logprobs = choice["logprobs"]
    assert [len(values) for values in logprobs.values()] == [12] * 4
    vocabulary = endpoints["consort"].token_decoder
    likeliest = {vocabulary.text_of(token) for token, _ in fake_logprobs(9, 3).top}
    for token, logprob, top, begin in zip(*logprobs.values(), strict=True):
        assert set(top) == likeliest | {token}
        assert top[token] == logprob
        assert begin <= len(choice["text"])
        if not token.startswith("bytes:"):
            assert choice["text"][begin:].startswith(token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert [len(top) for top in complete(fake, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"]] == [1] * 12


def test_a_chats_logprobs(fake: TestClient) -> None:
    (choice,) = chat(fake, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
        == choice["message"]["content"]
    )
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 12
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert chat(fake, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(fake)["choices"][0]["logprobs"] is None


def test_echo_begins_with_the_prompt(fake: TestClient, coordinator: FakeCoordinator) -> None:
    plain = complete(fake)["choices"][0]["text"]
    (choice,) = complete(fake, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "import os" + plain
    logprobs, prompt = choice["logprobs"], coordinator.requests[-1].prompt
    assert len(logprobs["tokens"]) == len(prompt) + 12
    assert logprobs["token_logprobs"][: len(prompt)] == [None] + [
        fake_logprobs(token, 0).logprob for token in prompt[1:]
    ]
    assert logprobs["text_offset"][len(prompt)] == len("import os")
    for token, begin in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert token.startswith("bytes:") or choice["text"][begin:].startswith(token)
    assert complete(fake, prompt=list(prompt), echo=True)["choices"][0]["text"] == choice["text"]


def test_the_prompt_alone(fake: TestClient) -> None:
    answer = complete(fake, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "import os"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_prompt_logprobs_are_vllms(fake: TestClient, coordinator: FakeCoordinator) -> None:
    (choice,) = complete(fake, prompt_logprobs=2)["choices"]
    prompt = coordinator.requests[-1].prompt
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token, candidates in zip(prompt[1:], others, strict=True):
        assert set(candidates) == {str(token), "6", "7"}
        assert candidates[str(token)]["rank"] == token - 5
        assert set(candidates["6"]) == {"logprob", "rank", "decoded_token"}
    assert len(chat(fake, prompt_logprobs=0)["prompt_logprobs"]) == len(coordinator.requests[-1].prompt)


def test_details_of_tokens(fake: TestClient) -> None:
    (choice,) = complete(fake, return_token_details=True)["choices"]
    assert "".join(detail["text"] for detail in choice["token_details"]) == choice["text"]
    assert len(choice["token_details"]) == 12
    assert {detail["source"] for detail in choice["token_details"]} <= {"accepted", "recovered"}
    echoed = complete(fake, return_token_details=True, echo=True)["choices"][0]
    assert echoed["token_details"] == choice["token_details"]
    assert "token_details" not in complete(fake)["choices"][0]


def test_why_an_answer_ended(fake: TestClient) -> None:
    (choice,) = complete(fake)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    stop = choice["text"][5:8]
    (stopped,) = complete(fake, stop=stop)["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


def test_speculation_is_told(fake: TestClient) -> None:
    speculation = complete(fake)["speculation"]
    rates = {"acceptance_rate", "acceptance_length", "hit_rate"}
    assert set(speculation) == {"steps", "drafted", "accepted", "proposers"} | rates
    assert speculation["hit_rate"] == 1


WANTS: list[dict[str, object]] = [
    {},
    {"n": 3},
    {"logprobs": 2},
    {"logprobs": 2, "echo": True, "n": 2},
    {"prompt": ["a", "bc"], "prompt_logprobs": 1, "return_token_details": True},
    {"stop": ["e"], "include_stop_str_in_output": True, "return_token_details": True},
]
CHAT_WANTS: list[dict[str, object]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "prompt_logprobs": 1, "return_token_details": True},
]
JOINED = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Join chunks into choices in the format of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in (choice for chunk in chunks for choice in chunk["choices"]):
        if "delta" in piece:
            piece["message"] = {"role": "assistant", "content": piece.pop("delta")["content"]}
        known = choices.setdefault(piece["index"], piece)
        if known is piece:
            continue
        for field in ("text", "token_details"):
            if field in piece:
                known[field] += piece[field]
        if "message" in piece:
            known["message"]["content"] += piece["message"]["content"]
        for name in JOINED:
            if name in (piece["logprobs"] or {}):
                known["logprobs"][name] += piece["logprobs"][name]
        known |= {name: piece[name] for name in ("finish_reason", "stop_reason") if name in piece}
    return choices


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {**BODY, **wants}) for wants in WANTS]
    + [("/v1/chat/completions", {**CHAT, **wants}) for wants in CHAT_WANTS],
)
def test_chunks_add_up_to_the_whole(fake: TestClient, path: str, body: dict[str, Any]) -> None:
    whole = fake.post(path, json=body).json()
    chunks = stream(fake, path, body)
    choices = joined(chunks)
    assert [choices[index] for index in sorted(choices)] == whole["choices"]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk][:1] == (
        [whole["prompt_logprobs"]] if "prompt_logprobs" in whole else []
    )
    assert chunks[-1]["speculation"] == whole["speculation"]
