"""/tokenize and /detokenize as in vLLM, and texts of single tokens."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.apis.decoder import TokenDecoder
from deployments.endpoints.endpoint import ServedEndpoint
from tests.support.byte_level import byte_level_tokenizer

TEXT = "def naïve(x):\n    return '漢字'"


def test_a_text_there_and_back(fake: TestClient) -> None:
    asked = {"model": "consort", "prompt": TEXT, "return_token_strs": True}
    reply = fake.post("/tokenize", json=asked).json()
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 1024)
    assert len(reply["token_strs"]) == reply["count"]
    back = fake.post("/detokenize", json={"model": "consort", "tokens": reply["tokens"]}).json()
    assert back == {"prompt": "<|begin|>" + TEXT}
    bare = fake.post("/tokenize", json={**asked, "add_special_tokens": False, "return_token_strs": None}).json()
    assert bare["tokens"] == reply["tokens"][1:]
    assert bare["token_strs"] is None


def test_a_conversation(fake: TestClient, coordinator: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    reply = fake.post("/tokenize", json={"model": "consort", "messages": messages}).json()
    fake.post("/v1/chat/completions", json={"model": "consort", "messages": messages, "max_tokens": 1})
    assert reply["tokens"] == coordinator.requests[-1].prompt
    without = {"model": "consort", "messages": messages, "add_generation_prompt": False}
    assert fake.post("/tokenize", json=without).json()["tokens"] == reply["tokens"][:-1]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt"),
        ("/tokenize", {"text": "x"}, "prompt"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_input_is_refused(fake: TestClient, path: str, fields: dict[str, object], param: str) -> None:
    reply = fake.post(path, json={"model": "consort", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_the_bytes_of_tokens_are_the_texts(endpoints: dict[str, ServedEndpoint]) -> None:
    served = endpoints["consort"]
    tokens = served.encoder.text(TEXT, "prompt", add_special_tokens=False)
    assert b"".join(map(served.token_decoder.bytes_of, tokens)).decode() == TEXT
    assert served.token_decoder.text_of(1) == "<|begin|>"
    assert any(served.token_decoder.text_of(token).startswith("bytes:\\x") for token in tokens)
    assert "".join(piece for token in tokens if (piece := served.token_decoder.text_of(token)))


def test_a_token_beyond_the_tokenizer_is_empty() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    vocabulary = TokenDecoder(tokenizer, 400)
    assert vocabulary.bytes_of(399) == b""
