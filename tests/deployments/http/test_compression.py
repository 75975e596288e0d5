"""Compression over HTTP: with made-up probabilities, and with those of a tiny model."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.admission.bounds import Limits
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from tests.deployments.fake_coordinator import FakeCoordinator
from tests.deployments.scripted import TEMPLATE

DOCUMENT = "\n\n".join(f"def f{i}(x):\n    return x + {i}. It adds {i} to its argument." for i in range(12))
SHORT = "\n\n".join(DOCUMENT.split("\n\n")[:3])
QUESTION = "What does f7 add?"
PROMPT = f"{DOCUMENT}\n\n{QUESTION}"
HALF = {"rate": 0.5, "return_prompt": True}


@pytest.fixture
def compressing() -> dict[str, ServedEndpoint]:
    data = {
        "models": {name: {"path": str(ROOT / "models" / name)} for name in ("target", "drafter")},
        "endpoints": {"consort": {"target": "target", "drafter": "drafter", "compressor": "drafter"}},
    }
    served = load_endpoints(parse_config(data, folder=ROOT))
    served["consort"].encoder.tokenizer.chat_template = TEMPLATE
    return served


@pytest.fixture
def fake(compressing: dict[str, ServedEndpoint], coordinator: Any) -> Iterator[TestClient]:
    service = Service(compressing, coordinator, limits=Limits(max_requests=8), cached_tokens=1000)
    with TestClient(make_api(service)) as client:
        yield client


def post(client: TestClient, path: str = "/v1/completions", **fields: Any) -> Any:
    fields = {"model": "consort", **fields}
    return client.post(
        path, json=fields if path == "/compress" else {"max_tokens": 2, "temperature": 0, **fields}
    ).json()


@pytest.mark.parametrize("method", ["perplexity", "sentence"])
def test_a_compressed_prompt_is_what_the_target_gets(
    fake: TestClient, coordinator: FakeCoordinator, compressing: dict[str, ServedEndpoint], method: str
) -> None:
    answer = post(fake, prompt=PROMPT, prompt_compression={**HALF, "method": method})
    sent = coordinator.requests[-1]
    assert answer["compressed_prompt"] == compressing["consort"].token_decoder.decode(list(sent.prompt))
    assert answer["compressed_prompt"].endswith(QUESTION)
    usage = answer["usage"]
    compression = usage["prompt_compression"]
    assert compression["original_tokens"] == len(compressing["consort"].encoder.prompt(PROMPT))
    assert compression["compressed_tokens"] == usage["prompt_tokens"] == len(sent.prompt)
    assert compression["ratio"] == round(len(sent.prompt) / compression["original_tokens"], 4)
    assert 0.3 < compression["ratio"] < 0.7
    again = post(fake, prompt=PROMPT, prompt_compression={**HALF, "method": method})
    assert again["compressed_prompt"] == answer["compressed_prompt"]


@pytest.mark.parametrize("method", ["perplexity", "sentence", "attention"])
def test_rate_1_changes_nothing(fake: TestClient, coordinator: FakeCoordinator, method: str) -> None:
    answer = post(fake, prompt=PROMPT, prompt_compression={"method": method, "rate": 1, "return_prompt": True})
    assert answer["compressed_prompt"] == PROMPT
    assert answer["usage"]["prompt_compression"]["ratio"] == 1
    assert len(coordinator.requests) == 1
    plain = post(fake, prompt=PROMPT)
    assert "prompt_compression" not in plain["usage"]
    assert coordinator.requests[0].prompt == coordinator.requests[1].prompt
    assert coordinator.requests[0].prompt_positions is None


def test_chunks_keep_their_positions(
    fake: TestClient, coordinator: FakeCoordinator, compressing: dict[str, ServedEndpoint]
) -> None:
    answer = post(fake, prompt=PROMPT, prompt_compression={**HALF, "method": "attention"})
    reading, sent = coordinator.requests
    whole = compressing["consort"].encoder.prompt(PROMPT)
    assert reading.params.prompt_attention
    assert list(reading.prompt) == whole
    assert sent.prompt_positions is not None
    assert sent.prompt_positions.length == len(whole) == answer["usage"]["prompt_compression"]["original_tokens"]
    assert [whole[position] for position in sent.prompt_positions.kept] == list(sent.prompt)
    assert 0.4 < answer["usage"]["prompt_compression"]["ratio"] < 0.7
    assert answer["compressed_prompt"].endswith(QUESTION)
    assert sent.cache_salt


def test_chunks_of_a_chat_leave_the_system_message(fake: TestClient, coordinator: FakeCoordinator) -> None:
    messages = [
        {"role": "system", "content": SHORT},
        {"role": "user", "content": f"{DOCUMENT}\n\n```\n{SHORT}\n```\n\n{QUESTION}"},
    ]
    options = {"method": "attention", "rate": 0.5, "return_prompt": True}
    answer = post(fake, "/v1/chat/completions", messages=messages, prompt_compression=options)
    kept = answer["compressed_prompt"]
    assert kept.index(SHORT) < kept.index(f"```\n{SHORT}\n```") < kept.index(QUESTION)
    sent = coordinator.requests[-1]
    assert sent.prompt_positions is not None
    assert 0.5 < len(sent.prompt) / sent.prompt_positions.length < 0.85
    options = {"method": "attention", "target_tokens": 9}
    error = post(fake, "/v1/chat/completions", messages=messages, prompt_compression=options)
    assert error["error"]["message"].startswith("target_tokens: should be above")


def test_attention_is_refused_where_it_has_no_meaning(fake: TestClient, compressing: dict[str, ServedEndpoint]) -> None:
    options = {"rate": 0.5, "method": "attention"}
    alone = post(fake, "/compress", prompt=PROMPT, **options)["error"]["message"]
    assert alone == "method: should be perplexity or sentence: attention leaves tokens, not a text"
    beams = post(fake, prompt=PROMPT, prompt_compression=options, use_beam_search=True, n=2)["error"]["message"]
    assert beams.startswith("prompt_compression.method: attention and use_beam_search don't go together")
    compressor = compressing["consort"].compressor
    assert compressor is not None
    object.__setattr__(compressor, "has_target_tokens", False)
    others = post(fake, prompt=PROMPT, prompt_compression=options)["error"]["message"]
    assert others.startswith("prompt_compression.method: attention needs a compressor with the target's tokens")
    object.__setattr__(compressor, "has_target_tokens", True)
    object.__setattr__(compressor, "context_length", 100)
    long = post(fake, prompt=PROMPT, prompt_compression=options)["error"]["message"]
    assert "but the compressor can read 91" in long


def test_caches_are_left_alone(fake: TestClient, coordinator: FakeCoordinator) -> None:
    for _ in range(2):
        post(fake, prompt=PROMPT, prompt_compression={"rate": 0.5})
    answers = [request for request in coordinator.requests if request.endpoint.target == "target"]
    assert len({request.cache_salt for request in answers}) == 2
    assert not any(request.may_cache for request in coordinator.requests)


def test_system_and_tool_messages_and_the_question_stay(fake: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SHORT},
        {"role": "user", "content": SHORT},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": SHORT},
        {"role": "user", "content": f"{SHORT}\n\n```\n{SHORT}\n```\n\n{QUESTION}"},
    ]
    path = "/v1/chat/completions"
    kept: Any = post(fake, path, messages=messages, prompt_compression=HALF)["compressed_prompt"]
    assert [turn["role"] for turn in kept] == [message["role"] for message in messages]
    assert kept[0]["content"] == kept[3]["content"] == SHORT
    assert len(kept[1]["content"] + kept[4]["content"]) < len(messages[1]["content"] + messages[4]["content"])
    assert f"```\n{SHORT}\n```" in kept[4]["content"]
    assert kept[4]["content"].endswith(QUESTION)


def test_a_budget_counts_what_stays(fake: TestClient) -> None:
    options = {"target_tokens": 150, "return_prompt": True}
    usage = post(fake, prompt=PROMPT, prompt_compression=options)["usage"]
    assert 120 <= usage["prompt_tokens"] <= 160
    error = post(fake, prompt=PROMPT, prompt_compression={"target_tokens": 1})["error"]
    assert error["message"].startswith("target_tokens: should be above")


def test_a_stream_ends_with_both_lengths(fake: TestClient) -> None:
    body = {"model": "consort", "prompt": PROMPT, "max_tokens": 2, "prompt_compression": HALF}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = fake.post("/v1/completions", json={**body, **options}).text
    assert '"original_tokens":' in text
    assert '"compressed_prompt":' in text


def test_compress_alone(fake: TestClient) -> None:
    alone = post(fake, "/compress", prompt=PROMPT, rate=0.5, question=QUESTION)
    whole = post(fake, prompt=PROMPT, prompt_compression={**HALF, "question": QUESTION})
    assert alone["prompt"] == whole["compressed_prompt"]
    assert alone["ratio"] == round(alone["compressed_tokens"] / alone["original_tokens"], 4)
    messages = [{"role": "user", "content": PROMPT}]
    turns = post(fake, "/compress", messages=messages, rate=0.5)["messages"]
    assert turns[0]["content"].endswith(QUESTION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rate": 0.5, "method": "words"},
            "prompt_compression.method: should be perplexity, sentence or attention",
        ),
        ({"rate": 0}, "prompt_compression.rate: should be greater than 0"),
        ({}, "prompt_compression.rate: should be set, or else target_tokens"),
        ({"rate": 0.5, "metod": "sentence"}, "prompt_compression.metod: is not known; did you mean 'method'?"),
    ],
)
def test_wrong_options_are_named(fake: TestClient, options: dict[str, Any], message: str) -> None:
    assert post(fake, prompt=PROMPT, prompt_compression=options)["error"]["message"].startswith(message)


def test_token_ids_and_endpoints_without_a_compressor_are_refused(fake: TestClient, client: TestClient) -> None:
    wrong = post(fake, prompt=[7, 8, 9], prompt_compression=HALF)["error"]["message"]
    assert wrong == "prompt_compression: needs a prompt of text, not of token ids."
    none = post(client, prompt=PROMPT, prompt_compression=HALF)["error"]["message"]
    assert none.startswith("prompt_compression: the endpoint 'consort' has no compressor; set endpoints.consort.comp")


def test_a_models_own_probabilities_decide(compressing: dict[str, ServedEndpoint], engine: Any) -> None:
    """The tiny engine's target scores here, as it serves; the text is the same each time."""
    compressor = compressing["consort"].compressor
    assert compressor is not None
    object.__setattr__(compressor, "model", "target")
    with TestClient(make_api(Service(compressing, engine.coordinator, limits=Limits(max_requests=8)))) as client:
        texts = [post(client, "/compress", prompt=PROMPT, rate=0.3, question=QUESTION)["prompt"] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) < 0.6 * len(PROMPT)


def test_a_models_own_attention_decides(compressing: dict[str, ServedEndpoint], engine: Any) -> None:
    compressor = compressing["consort"].compressor
    assert compressor is not None
    object.__setattr__(compressor, "model", "target")
    options = {"method": "attention", "rate": 0.3, "return_prompt": True}
    with TestClient(make_api(Service(compressing, engine.coordinator, limits=Limits(max_requests=8)))) as client:
        answers = [post(client, prompt=PROMPT, max_tokens=6, prompt_compression=options) for _ in range(2)]
    assert answers[0]["compressed_prompt"] == answers[1]["compressed_prompt"]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[0]["usage"]["prompt_compression"]["ratio"] < 0.5
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
