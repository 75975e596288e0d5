"""Shared prefixes of prompts are computed once, and the texts stay the same."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.loops.row import Row
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model

SLOTS = 4
MODELS = {name: tiny_model(family) for name, family in (("target", "llama-gqa"), ("drafter", "mistral-window"))}


@contextmanager
def running(chunk: int) -> Iterator[Engine]:
    roles: dict[str, Role] = {"target": "target", "drafter": "drafter"}
    replicas = {
        name: (role, Runner(MODELS[name], slots=SLOTS, max_length=192, max_query=64)) for name, role in roles.items()
    }
    with Engine(replicas, LoopOptions(prefill_chunk=chunk)) as engine:
        yield engine


def prompts_of_a_tree(seed: int, count: int) -> list[list[int]]:
    """Return prompts that each continue a part of an earlier one."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[]]
    for _ in range(count):
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))]
        prompts.append([*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))][:150])
    return prompts[1:]


def requests(seed: int, drafter: str | None) -> list[Request]:
    endpoint = Endpoint("e", "target", drafter, 4, decode=str)
    return [
        Request(endpoint, prompt, SamplingParams(max_tokens=12, temperature=i % 2, seed=i), request_id=i)
        for i, prompt in enumerate(prompts_of_a_tree(seed, 24))
    ]


def tokens(engine: Engine, asked: list[Request]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in engine.generate(asked)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafter", ["drafter", None])
def test_texts_are_the_same_as_without_sharing(seed: int, drafter: str | None) -> None:
    asked = requests(seed, drafter)
    with (
        mock.patch.object(Row, "may_share", False),
        mock.patch("actors.verifier.rows.TargetRow.may_share", False),
        running(64) as engine,
    ):
        expected = tokens(engine, asked)
    with running(32) as engine:
        target = engine.loops["target"]
        assert tokens(engine, asked) == expected
        assert tokens(engine, asked) == expected  # the slots still hold the first run's tokens
        assert target.load().active == 0


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    prompt = [i % VOCAB for i in range(120)]
    request = Request(Endpoint("e", "target", None, 0, decode=str), prompt, SamplingParams(max_tokens=2, temperature=0))
    runner = Runner(MODELS["target"], slots=2, max_length=192, max_query=64)
    engine = Engine({"target": ("target", runner)}, LoopOptions(prefill_chunk=16))
    with engine, mock.patch.object(runner, "logits", wraps=runner.logits) as logits:
        list(engine.stream(request))
        first = sum(len(row.tokens) for call in logits.call_args_list for row in call.args[0])
        logits.reset_mock()
        list(engine.stream(request))
        again = sum(len(row.tokens) for call in logits.call_args_list for row in call.args[0])
    assert (first, again) == (121, 120 - 112 + 1)  # whole pages of 16 tokens are taken over


def test_choices_of_one_prompt_compute_it_once() -> None:
    prompt = [i % VOCAB for i in range(120)]
    endpoint = Endpoint("e", "target", None, 0, decode=str)
    asked = [Request(endpoint, prompt, SamplingParams(max_tokens=3, seed=i), request_id=i) for i in range(4)]
    runner = Runner(MODELS["target"], slots=4, max_length=192, max_query=64)
    with Engine({"target": ("target", runner)}, LoopOptions(prefill_chunk=16)) as engine:
        with mock.patch.object(runner, "logits", wraps=runner.logits) as logits:
            together = tokens(engine, asked)
            computed = sum(len(row.tokens) for call in logits.call_args_list for row in call.args[0])
        assert computed < 120 + 16 * 4
        alone = [tokens(engine, [request])[0] for request in asked]
    assert together == alone
