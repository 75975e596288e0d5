"""Heads on the target's hidden states draft, and change no text: greedy, sampled, in mixed batches, after fail-over."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.judge import judge
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.dflash_proposer import DFlashProposer
from engine.heads.medusa import MedusaProposer
from engine.heads.spec import HeadsKind
from engine.model.runner import Runner
from tests.in_process.test_formulas import guidance
from tests.in_process.test_parameters import PROMPTS, SETTINGS, params, text, tokens
from tests.support.heads import STATES, greedy_texts, medusa_heads, medusa_tensors, trained_dflash, trained_eagle3
from tests.support.models import tiny_model
from tests.support.waiting import wait_until

KINDS: tuple[HeadsKind, ...] = ("medusa", "eagle3", "dflash")
TARGET = tiny_model("llama-gqa")
OTHER_PROPOSERS: dict[str, Any] = {"drafter": "d", "colocated": True, "ngram": NgramOptions()}


@cache
def heads_module(kind: HeadsKind, **head: Any) -> Any:
    texts = greedy_texts(TARGET, [prompt[:4] for prompt in PROMPTS])
    if kind == "medusa":
        return medusa_heads(medusa_tensors(TARGET, texts))
    return trained_eagle3(TARGET, texts) if kind == "eagle3" else trained_dflash(TARGET, texts, **head)


@cache
def broken_heads(kind: HeadsKind, value: float) -> Any:
    """Heads whose weights are all `value`."""
    module = deepcopy(heads_module(kind))
    for parameter in module.parameters():
        parameter.fill_(value)
    return module


def make(
    kind: HeadsKind | None,
    *,
    slots: int,
    graphs: bool = False,
    pages: int | None = None,
    weight: float | None = None,
    **head: Any,
) -> tuple[Runner, Any]:
    """Make a runner and heads. weight: in place of all their weights. head: options of a DFlash head."""
    model = tiny_model("llama-gqa")  # each replica its own: hooks of two threads on one model would mix their states
    runner = Runner(model, slots=slots, max_length=128, max_query=64, pages=pages)
    if kind is None:
        return runner, None
    runner.keep_hidden_states(() if kind == "medusa" else STATES)
    if graphs:
        runner.use_graphs(capture=lambda run: run)
    module = heads_module(kind, **head) if weight is None else broken_heads(kind, weight)
    if kind == "dflash":
        module = deepcopy(module)
        module.join_context()
    proposers = {"medusa": MedusaProposer, "eagle3": ChainProposer, "dflash": DFlashProposer}
    return runner, proposers[kind](module, runner)


@contextmanager
def running(
    kind: HeadsKind | None, *, slots: int = 16, chunk: int = 64, targets: int = 1, drafter: bool = False, **size: Any
) -> Iterator[Engine]:
    replicas: dict[str, tuple[Role, Runner]] = {}
    options: dict[str, LoopOptions] = {}
    for index in range(targets):
        runner, heads = make(kind, slots=slots, **size)
        name = "target" if index == 0 else f"target#{index}"
        replicas[name] = ("target", runner)
        colocated = Runner(tiny_model("llama"), slots=slots, max_length=128, max_query=64) if drafter else None
        options[name] = LoopOptions(adaptive=False, prefill_chunk=chunk, heads=heads, colocated=colocated)
    with Engine(replicas, own_options=options) as engine:
        yield engine


def endpoint(kind: HeadsKind | None, **more: Any) -> Endpoint:
    return replace(Endpoint("e", "target", None, 4, text, heads=kind), **more)


def mixed(kind: HeadsKind | None, **more: Any) -> list[Request]:
    where = endpoint(kind, **more)
    pairs = zip(PROMPTS, SETTINGS * 2, strict=False)
    return [Request(where, prompt, params(setting, i), request_id=i) for i, (prompt, setting) in enumerate(pairs)]


@cache
def expected() -> list[list[int]]:
    with running(None) as engine:
        return tokens(engine.generate(mixed(None)))


def accepted(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.accepted for answer in answers)


@pytest.mark.parametrize(
    "how",
    [{}, {"chunk": 3}, {"graphs": True}, {"slots": 3}, {"pages": 24}, {"drafter": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_has_the_same_texts(kind: HeadsKind, how: dict[str, Any]) -> None:
    others = OTHER_PROPOSERS if how.get("drafter") else {}
    with running(kind, **how) as engine:
        answers = engine.generate(mixed(kind, **others))
    assert tokens(answers) == expected()
    assert accepted(answers) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_heads_draft_for_guided_rows_beside_others(kind: HeadsKind) -> None:
    """They read the states of a row's own text, which lie beside those of its negative prompt."""

    def requests(own: HeadsKind | None) -> list[Request]:
        plain, negative = mixed(own), guidance(1.5, [9, 8, 7])
        return [replace(request, **negative) if index % 2 else request for index, request in enumerate(plain)]

    with running(None) as engine:
        texts = tokens(engine.generate(requests(None)))
    with running(kind) as engine:
        answers = engine.generate(requests(kind))
    assert tokens(answers) == texts
    assert accepted(answers[1::2]) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ran_out_of_memory_is_not_read(kind: HeadsKind) -> None:
    """Drafts end with the first step that runs out of memory, so the next one has fewer tokens."""
    steps = 0

    def lacking_memory(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 12:
            raise torch.OutOfMemoryError("sampling")
        return judge(*given)

    with mock.patch("actors.verifier.loop.judge", lacking_memory), running(kind) as engine:
        answers = engine.generate(mixed(kind))
        engine.check()
    assert tokens(answers) == expected()


@pytest.mark.parametrize("kind", KINDS)
def test_they_know_greedy_text(kind: HeadsKind) -> None:
    greedy = SamplingParams(max_tokens=40, temperature=0)
    with running(kind) as engine:
        answers = engine.generate([Request(endpoint(kind), prompt[:4], greedy) for prompt in PROMPTS[:8]])
    total = sum(answer[-1].statistics.steps for answer in answers)
    assert accepted(answers) > total / 2


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_under_rejection_is_that_of_the_target(kind: HeadsKind) -> None:
    where = endpoint(kind)
    requests = [
        Request(where, prompt, params(setting, i, verification="rejection"))
        for i, (prompt, setting) in enumerate(zip(PROMPTS, SETTINGS * 2, strict=False))
    ]
    with running(kind) as engine:
        answers = engine.generate(requests)
    greedy = [i for i, request in enumerate(requests) if request.params.greedy]
    texts = tokens(answers)
    assert [texts[i] for i in greedy] == [expected()[i] for i in greedy]
    assert sum(answers[i][-1].statistics.drafted for i in range(len(requests)) if i not in greedy) > 20


@pytest.mark.parametrize(
    ("how", "weight"),
    [({}, math.nan), ({"graphs": True}, math.inf), ({"slots": 3}, math.nan), ({"drafter": True}, math.inf)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_numbers_change_no_text(kind: HeadsKind, weight: float, how: dict[str, Any]) -> None:
    requests = mixed(kind, **(OTHER_PROPOSERS if how.get("drafter") else {}))
    rejecting = [Request(r.endpoint, r.prompt, replace(r.params, verification="rejection")) for r in requests]
    with running(kind, weight=weight, **how) as engine:
        texts = tokens(engine.generate([*requests, *rejecting]))
        engine.check()
    greedy = [i for i, request in enumerate(requests) if request.params.greedy]  # drafts choose among other texts
    assert texts[: len(requests)] == expected()
    assert [texts[len(requests) + i] for i in greedy] == [expected()[i] for i in greedy]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_after_a_fail_over(kind: HeadsKind) -> None:
    with running(kind, targets=2) as engine:
        answers: list[list[Delta]] = [[] for _ in PROMPTS]
        requests = mixed(kind)
        for request, answer in zip(requests, answers, strict=True):
            engine.coordinator.submit(request, answer.append)
        wait_until(lambda: sum(map(len, answers)) > len(PROMPTS), "first tokens")
        engine.lose("target")
        wait_until(lambda: all(answer and answer[-1].finish for answer in answers), "all answers", timeout_s=120)
    assert tokens(answers) == expected()


@pytest.mark.parametrize("how", [{}, {"slots": 3}], ids=str)
def test_entries_that_depend_on_the_token_before_change_no_text(how: dict[str, Any]) -> None:
    with running("dflash", markov="rnn", markov_rank=8, anchor_drafts=True, **how) as engine:
        answers = engine.generate(mixed("dflash"))
    assert tokens(answers) == expected()
    assert accepted(answers) > 10


def test_statistics_and_tokens_name_the_proposers() -> None:
    where = endpoint("medusa", **OTHER_PROPOSERS)
    greedy = SamplingParams(max_tokens=40, temperature=0)
    with running("medusa", drafter=True) as engine:
        everybody, nobody, medusa_only = engine.generate(
            [
                Request(where, PROMPTS[0], greedy),
                Request(where, PROMPTS[0], greedy, proposers=frozenset()),
                Request(where, PROMPTS[0], greedy, proposers=frozenset({"medusa"})),
            ]
        )
    assert tokens([everybody]) == tokens([nobody]) == tokens([medusa_only])
    assert nobody[-1].statistics.drafted == 0
    assert set(medusa_only[-1].statistics.drafted_by) == {"medusa"}
    for answer in (everybody, medusa_only):
        statistics = answer[-1].statistics
        assert sum(statistics.drafted_by.values()) == statistics.drafted
        assert sum(statistics.accepted_by.values()) == statistics.accepted > 0
        assert json.loads(json.dumps(asdict(statistics)))["accepted_by"] == statistics.accepted_by  # for reports
        names = [token.proposer for delta in answer for token in delta.tokens if token.proposer is not None]
        assert {name: names.count(name) for name in set(names)} == {
            name: count for name, count in statistics.accepted_by.items() if count
        }
