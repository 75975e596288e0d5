"""Logits that are no numbers fail the requests that get them, and no others."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.coordinator.request import Delta, Endpoint, Request
from actors.replica.in_process import Engine
from decoding.beams.options import BeamOptions
from decoding.blending.params import EnsembleOptions
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import tiny_model
from tests.support.waiting import wait_until, wait_until_idle

BAD = 7  # a token after which the broken model's logits are no numbers
PLAIN = Endpoint("plain", "target", None, 0, decode=lambda tokens: "".join(chr(97 + token % 26) for token in tokens))
DRAFTED = replace(PLAIN, name="drafted", drafter="drafter", draft_length=3)
BLENDED = replace(PLAIN, name="blended", members=("member",), ensemble=EnsembleOptions())
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 3},
    "cut off": {"temperature": 0.9, "typical_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    "rejecting": {"temperature": 0.9, "verification": "rejection", "seed": 3, "logprobs": 1},
}


def runner(poison: float | None = None, *, token: int | None = BAD) -> Runner:
    """Make a runner. poison: in the embedding of a token, None: of all tokens."""
    model: Any = tiny_model("llama-gqa")
    if poison is not None:
        with torch.no_grad():
            rows = model.get_input_embeddings().weight
            rows[slice(None) if token is None else token] = poison
            if token is None:
                model.get_output_embeddings().weight.copy_(torch.zeros_like(rows) + poison)
    return Runner(model, slots=9, max_length=96, max_query=32)


def params(**more: Any) -> SamplingParams:
    suppressed = {"suppress_tokens": (BAD,)}  # so that only prompts have it
    return SamplingParams(**{"max_tokens": 12, "eos_token_ids": (), **suppressed, **more})


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[list[Delta]]:
    """Answer requests together. The last delta of each has its finish or its error."""
    answers: list[list[Delta]] = [[] for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        engine.coordinator.submit(request, answer.append)
    wait_until(lambda: all(a and (a[-1].finish or a[-1].error) for a in answers), "answers", timeout_s=120)
    return answers


def error_of(answer: list[Delta]) -> str:
    error = answer[-1].error
    assert isinstance(error, UnavailableError)
    return str(error)


def tokens_of(answer: list[Delta]) -> list[int]:
    assert answer[-1].error is None
    return [token for delta in answer for token in delta.token_ids]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("endpoint", [PLAIN, DRAFTED])
def test_only_requests_with_such_logits_fail(poison: float, endpoint: Endpoint) -> None:
    good = [Request(endpoint, [3, i, 5], params(**kind)) for i, kind in enumerate(KINDS.values(), 10)]
    bad = [Request(endpoint, [3, BAD, i], params(**kind)) for i, kind in enumerate(KINDS.values(), 10)]
    bad.append(Request(PLAIN, [3, BAD], params(temperature=0), beams=BeamOptions(num_beams=3)))
    with Engine({"target": ("target", runner()), "drafter": ("drafter", runner())}) as engine:
        expected = [tokens_of(answer) for answer in answers_of(engine, good)]
    with Engine({"target": ("target", runner(poison)), "drafter": ("drafter", runner())}) as engine:
        answers = answers_of(engine, [*bad, *good])
        wait_until_idle(engine)
    for request, answer, tokens in zip(good, answers[len(bad) :], expected, strict=True):
        if request.params.rejects and endpoint is DRAFTED:  # drafts decide which of the probable texts comes
            assert len(tokens_of(answer)) == len(tokens)
        else:
            assert tokens_of(answer) == tokens
    for answer in answers[: len(bad)]:
        assert "NaN" in error_of(answer) or "not finite" in error_of(answer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_without_numbers_changes_nothing(kind: str) -> None:
    asked = [Request(DRAFTED, [3, i, 5], params(**KINDS[kind])) for i in range(10, 14)]
    with Engine({"target": ("target", runner()), "drafter": ("drafter", runner(math.nan, token=None))}) as engine:
        plain = [tokens_of(answer) for answer in answers_of(engine, [replace(r, endpoint=PLAIN) for r in asked])]
        drafted = [tokens_of(answer) for answer in answers_of(engine, asked)]
    assert list(map(len, drafted)) == [12] * len(asked)
    if kind != "rejecting":  # as above
        assert drafted == plain


def test_the_member_without_numbers_is_named() -> None:
    asked = [Request(BLENDED, prompt, params(temperature=0)) for prompt in ([3, BAD, 5], [3, 4, 5])]
    with Engine({"target": ("target", runner()), "member": ("target", runner(math.nan))}) as engine:
        bad, good = answers_of(engine, asked)
    assert "NaN, those of member 'member'" in error_of(bad)
    assert len(tokens_of(good)) == 12
