"""Requests as parsed: forms of prompts, aliases, defaults."""

import pytest
from pydantic import ValidationError

from deployments.schema import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_forms_of_prompts(prompt: object, parsed: object) -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": prompt})
    assert body.prompt == parsed
    assert body.prompt_count == len(body.prompt)


def test_defaults_are_openais() -> None:
    params = CompletionRequest(model="m", prompt=["x"]).sampling(max_tokens=5, eos_token_ids=[2], seed=9)
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, 0, ())
    assert (params.max_tokens, params.eos_token_ids, params.seed) == (5, (2,), 9)


def test_ignored_eos_ids_do_not_reach_the_decoder() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "ignore_eos": True})
    assert body.sampling(max_tokens=5, eos_token_ids=[2], seed=0).eos_token_ids == ()


@pytest.mark.parametrize("null", [False, True])
def test_what_changes_nothing_is_taken(null: bool) -> None:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "ignore_eos": False}
    fields = dict.fromkeys(neutral) if null else neutral
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "logprobs": None, **fields})
    params = body.sampling(max_tokens=5, eos_token_ids=[2], seed=0)
    assert params == CompletionRequest(model="m", prompt=["x"]).sampling(max_tokens=5, eos_token_ids=[2], seed=0)


def test_a_penalty_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"should be 1\.0, which changes nothing; penalties are not supported"):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", "repetition_penalty": 1.2})
    with pytest.raises(ValidationError, match="should be null; log-probabilities are not supported"):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", "logprobs": 5})


def test_one_stop_string_needs_no_list() -> None:
    assert CompletionRequest.model_validate({"model": "m", "prompt": "x", "stop": "\n"}).stop == ["\n"]


def test_a_drawn_seed_fits_into_a_double() -> None:
    body = CompletionRequest(model="m", prompt=["x"])
    assert all(0 <= body.seed_or_new() < 2**53 for _ in range(100))
    assert body.seed_or_new() != body.seed_or_new()
    assert CompletionRequest(model="m", prompt=["x"], seed=0).seed_or_new() == 0


def chat(**fields: object) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat().wanted_max_tokens is None
    assert chat(max_tokens=3).wanted_max_tokens == 3
    assert chat(max_completion_tokens=3).wanted_max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).wanted_max_tokens == 3
    with pytest.raises(ValidationError, match="differs"):
        chat(max_completion_tokens=3, max_tokens=4)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"
