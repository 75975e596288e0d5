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
