"""Ensembles write what a slow loop over plain forwards of their members writes, with drafts and without."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.loops.row_table import RowTable
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.inbox import TargetInbox
from actors.verifier.loop import Target
from actors.verifier.rows import TargetRow
from actors.wire.link import LocalLink
from actors.wire.messages import Join, Joined, LogitsReply, LogitsRequest, Message
from decoding.blending.blend import blend
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.errors import UnavailableError
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_parameters import noisy
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until, wait_until_idle

MODELS: dict[str, PreTrainedModel] = {
    "first": tiny_model("llama-gqa"),
    "second": noisy(noisy(tiny_model("llama-gqa"))),
    "third": tiny_model("qwen3"),
    "drafter": noisy(tiny_model("llama-gqa")),
}
PROMPTS = [[(5 * i + 3 * j + i * j) % VOCAB for j in range(2 + 3 * i)] for i in range(8)]
BLENDS = [
    BlendParams(kind="mixture"),
    BlendParams(kind="mixture", weights=(0.2, 0.8)),
    BlendParams(kind="product", weights=(3, 1)),
    BlendParams(kind="vote"),
    BlendParams(kind="gated", threshold=0.6),
    BlendParams(kind="contrastive"),
    BlendParams(kind="contrastive", form="scaled", beta=0.7),
]


class SlowRunner(Runner):
    """A runner so slow that drafts arrive in time."""

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        time.sleep(0.01)
        return super().logits(rows)


@contextmanager
def running(
    *, slots: int = 12, runner: type[Runner] = Runner, both: str = "", lengths: dict[str, int] | None = None
) -> Iterator[Engine]:
    """both: the model that is target and drafter. lengths: `max_length` of models, if it is not 128."""
    replicas: dict[str, tuple[Role, Runner]] = {
        name: (
            "both" if name == both else "drafter" if name == "drafter" else "target",
            (Runner if name == "drafter" else runner)(
                model, slots=slots, max_length=(lengths or {}).get(name, 128), max_query=64
            ),
        )
        for name, model in MODELS.items()
    }
    with Engine(replicas, LoopOptions(prefill_chunk=8, adaptive=False)) as engine:
        yield engine


def ensemble(
    blend: BlendParams, *, members: Sequence[str] = ("second",), drafter: str | None = None, **options: Any
) -> Endpoint:
    chosen = EnsembleOptions(blend=blend, **options)
    return Endpoint("e", "first", drafter, 4, decode=str, members=members, ensemble=chosen)


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=(0, 0.8)[i % 2], seed=i, **more)


def tokens(answer: list[Delta]) -> list[int]:
    return [token for delta in answer for token in delta.token_ids]


@torch.no_grad()
def reference(names: Sequence[str], options: BlendParams, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Write a text with one plain forward of each member per token."""
    text = list(prompt)
    for _ in range(params.max_tokens):
        logits = torch.stack([MODELS[name](torch.tensor([text])).logits[:, -1] for name in names])
        scores = blend(logits, [(options, [True] * len(names))])[0]
        if params.temperature:
            key = torch.tensor([noise_key(params.seed, len(text))], dtype=torch.int32)
            scores = scores / params.temperature + gumbel(key, VOCAB)[0]
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "options", BLENDS, ids=lambda o: f"{o.kind} {o.form if o.kind == 'contrastive' else ''}{o.weights}"
)
def test_blends_are_those_of_plain_forwards_with_drafts_and_without(options: BlendParams) -> None:
    prompts = PROMPTS[::2]
    expected = [reference(("first", "second"), options, prompt, params(i)) for i, prompt in enumerate(prompts)]
    for drafter, runner in ((None, Runner), ("drafter", SlowRunner), ("second", SlowRunner)):
        with running(runner=runner, both="second" if drafter == "second" else "") as engine:
            endpoint = ensemble(options, drafter=drafter)
            answers = engine.generate([Request(endpoint, prompt, params(i)) for i, prompt in enumerate(prompts)])
        assert [tokens(answer) for answer in answers] == expected
        accepted = sum(answer[-1].statistics.accepted for answer in answers)
        assert (accepted > 0) == (drafter is not None)


def test_a_member_may_draft_under_rejection_sampling_too() -> None:
    """Greedy texts are those of plain forwards; drawn ones depend on the drafts, which are accepted."""
    greedy = [params(2 * i, verification="rejection") for i in range(4)]
    drawn = [params(2 * i + 1, verification="rejection") for i in range(4)]
    endpoint = ensemble(BlendParams(), drafter="second")
    with running(runner=SlowRunner, both="second") as engine:
        requests = [Request(endpoint, prompt, setting) for prompt, setting in zip(PROMPTS, greedy + drawn, strict=True)]
        answers = engine.generate(requests)
    expected = [reference(("first", "second"), BlendParams(), PROMPTS[i], setting) for i, setting in enumerate(greedy)]
    assert [tokens(answer) for answer in answers[:4]] == expected
    assert all(len(tokens(answer)) == 16 for answer in answers)
    assert sum(answer[-1].statistics.accepted for answer in answers[4:]) > 0


def test_different_ensembles_and_plain_requests_share_their_models() -> None:
    """Each model leads one ensemble, is a member of another, and serves alone, all at once."""
    mixture, vote = BlendParams(), BlendParams(kind="vote", weights=(1, 1, 2))
    there, back = (
        ensemble(mixture),
        Endpoint("b", "second", None, 0, decode=str, members=("first", "third"), ensemble=EnsembleOptions(blend=vote)),
    )
    alone = Endpoint("a", "third", "drafter", 4, decode=str)
    names: dict[str, tuple[Sequence[str], BlendParams]] = {
        "e": (("first", "second"), mixture),
        "b": (("second", "first", "third"), vote),
        "a": (("third",), mixture),
    }
    endpoints = [there, back, alone, back, there, back, alone, there]
    requests = [Request(e, prompt, params(i)) for i, (e, prompt) in enumerate(zip(endpoints, PROMPTS, strict=True))]
    with running(slots=8) as engine:
        texts = [tokens(answer) for answer in engine.generate(requests)]
        wait_until_idle(engine)
    assert texts == [reference(*names[r.endpoint.name], r.prompt, r.params) for r in requests]


@pytest.mark.parametrize("slots", [1, 2])
def test_leaders_that_fill_each_others_replicas_do_not_wait_for_each_other(slots: int) -> None:
    """Each slot of both replicas is a leader's that waits for a member at the other."""
    there = ensemble(BlendParams())
    back = Endpoint("b", "second", None, 0, decode=str, members=("first",), ensemble=EnsembleOptions())
    names = {"e": ("first", "second"), "b": ("second", "first")}
    requests = [Request((there, back)[i % 2], prompt, params(i), request_id=i) for i, prompt in enumerate(PROMPTS)]
    with running(slots=slots) as engine:
        texts = [tokens(answer) for answer in engine.generate(requests)]
        wait_until_idle(engine)
    assert texts == [reference(names[r.endpoint.name], BlendParams(), r.prompt, r.params) for r in requests]


def test_an_ensemble_with_more_requests_than_slots_preempts_none() -> None:
    requests = [Request(ensemble(BlendParams()), PROMPTS[i % 8], params(i)) for i in range(16)]
    with (
        mock.patch.object(RowTable, "preempt") as preempted,
        running(slots=2, runner=SlowRunner) as engine,
    ):
        engine.generate(requests)
    assert not preempted.called


def test_a_round_that_ran_out_of_memory_sends_its_text_again() -> None:
    """Its request for logits is lost, and would be sent again only later."""
    handle, forward, lost = TargetInbox._handle, Target._forward, [3, 3]  # steps: of the request, and of the forward

    def lossy(inbox: TargetInbox, peer: str, message: Message) -> None:
        if isinstance(message, LogitsRequest) and message.step in lost:
            lost.remove(message.step)
        else:
            handle(inbox, peer, message)

    def failing(target: Target, inputs: Sequence[Sequence[RowInput]], samplers: list[TargetRow]) -> Tensor:
        rounds = [row.ensemble.round for row in samplers if row.ensemble is not None]
        if any(round_ is not None and round_.step in lost for round_ in rounds):
            lost.remove(3)
            raise torch.OutOfMemoryError
        return forward(target, inputs, samplers)

    with (
        mock.patch.object(TargetInbox, "_handle", lossy),
        mock.patch.object(Target, "_forward", failing),
        running() as engine,
    ):
        answer = list(engine.stream(Request(ensemble(BlendParams()), PROMPTS[3], params(1))))
    assert not lost
    assert answer[-1].members is not None
    assert answer[-1].members[0].tokens == 16  # the request was not begun anew
    assert tokens(answer) == reference(("first", "second"), BlendParams(), PROMPTS[3], params(1))


def test_answers_tell_who_contributed() -> None:
    with running() as engine:
        answer = list(engine.stream(Request(ensemble(BlendParams(weights=(3, 1))), PROMPTS[2], params(0))))
    shares = answer[-1].members
    assert shares is not None
    assert [(share.model, share.weight, share.tokens) for share in shares] == [
        ("first", 0.75, 16),
        ("second", 0.25, 16),
    ]
    assert all(0 <= share.agreement <= 1 for share in shares)
    assert shares[0].latency_s == 0 < shares[1].latency_s


@torch.no_grad()
def test_answers_tell_what_members_thought_of_each_token() -> None:
    """Compare with plain forwards of each member over the full text."""
    endpoint = ensemble(BlendParams(weights=(3, 1)), drafter="drafter", report_contributions=True)
    with running(runner=SlowRunner) as engine:
        answer = list(engine.stream(Request(endpoint, PROMPTS[2], params(1))))
    views = [token.views for delta in answer for token in delta.tokens]
    text = [*PROMPTS[2], *tokens(answer)]
    begin = len(PROMPTS[2]) - 1
    assert len(views) == len(text) - begin - 1
    for index, name in enumerate(("first", "second")):
        log_probs = MODELS[name](torch.tensor([text])).logits[0, begin:-1].log_softmax(dim=-1)
        own = log_probs[torch.arange(len(views)), torch.tensor(text[begin + 1 :])].tolist()
        assert [view[index].model for view in views] == [name] * len(views)
        assert [view[index].logprob for view in views] == pytest.approx(own, abs=1e-4)
        assert [view[index].agreed for view in views] == (
            log_probs.argmax(dim=-1) == torch.tensor(text[begin + 1 :])
        ).tolist()


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_a_member_that_is_withdrawn(policy: Any) -> None:
    endpoint = ensemble(BlendParams(weights=(1, 3)), on_member_failure=policy)
    long = SamplingParams(max_tokens=60, temperature=0)
    with running(runner=SlowRunner) as engine:
        stream = engine.stream(Request(endpoint, PROMPTS[3], long))
        first = [next(stream) for _ in range(5)]
        engine.lose("second")
        rest = list(stream)
    shares = rest[-1].members
    assert shares is not None
    if policy == "fail":  # requests that need a withdrawn member finish on it
        assert [share.weight for share in shares] == [0.25, 0.75]
        assert rest[-1].finish == "length"
        return
    assert [share.weight for share in shares] == [1, 0]
    assert shares[1].tokens < shares[0].tokens == 60
    text = [*PROMPTS[3], *tokens(first), *tokens(rest)]
    with torch.no_grad():
        alone = MODELS["first"](torch.tensor([text])).logits[0].argmax(-1)
    gone = len(PROMPTS[3]) + shares[1].tokens
    assert text[gone:] == alone[gone - 1 : -1].tolist()


def test_a_member_that_takes_too_long_is_dropped() -> None:
    endpoint = ensemble(BlendParams(), on_member_failure="drop", member_timeout_s=0.2)
    with running() as engine:
        stream = engine.stream(Request(endpoint, PROMPTS[3], SamplingParams(max_tokens=40, temperature=0)))
        next(stream)
        with mock.patch.object(engine.loops["second"], "_step"):
            rest = list(stream)
        wait_until_idle(engine)
    shares = rest[-1].members
    assert shares is not None
    assert shares[1].weight == 0
    assert rest[-1].statistics.committed == 40


def test_messages_to_and_from_members_that_are_lost_are_sent_again() -> None:
    handle, lost = TargetInbox._handle, {Join, Joined, LogitsRequest, LogitsReply}

    def lossy(inbox: TargetInbox, peer: str, message: Message) -> None:
        if type(message) in lost:
            lost.remove(type(message))
        else:
            handle(inbox, peer, message)

    with (
        mock.patch.object(TargetInbox, "_handle", lossy),
        mock.patch("actors.loops.mailbox.REPORT_PERIOD_S", 0.02),
        running() as engine,
    ):
        answer = list(engine.stream(Request(ensemble(BlendParams()), PROMPTS[3], params(1))))
    assert not lost
    assert tokens(answer) == reference(("first", "second"), BlendParams(), PROMPTS[3], params(1))


def test_connections_to_members_that_nobody_needs_are_closed() -> None:
    with (
        mock.patch("actors.verifier.leader._IDLE_S", 0.0),
        mock.patch.object(LocalLink, "disconnect") as closed,
        running() as engine,
    ):
        for i in range(2):
            answer = list(engine.stream(Request(ensemble(BlendParams()), PROMPTS[1], params(i))))
            assert tokens(answer) == reference(("first", "second"), BlendParams(), PROMPTS[1], params(i))
            wait_until(lambda: mock.call("second") in closed.mock_calls, "the connection to be closed")
            closed.reset_mock()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_transports_are_close(dtype: Any) -> None:
    exact = ensemble(BlendParams())
    with running() as engine:
        for endpoint in (ensemble(BlendParams(), member_dtype=dtype), ensemble(BlendParams(), member_top_k=VOCAB - 1)):
            pair = [
                Request(choice, PROMPTS[1], SamplingParams(max_tokens=4, temperature=0)) for choice in (exact, endpoint)
            ]
            first, second = engine.generate(pair)
            assert tokens(first)[:1] == tokens(second)[:1]


@pytest.mark.parametrize("on_member_failure", ["drop", "fail"])
def test_drafts_end_where_a_member_with_shorter_texts_does(on_member_failure: str) -> None:
    """So that the text, or the error, is the same with drafts and without."""
    answers: list[list[str]] = []
    with running(runner=SlowRunner, lengths={"second": 24}) as engine:
        for drafter in (None, "drafter"):
            endpoint = ensemble(
                BlendParams(kind="mixture", weights=(0.3, 0.7)), drafter=drafter, on_member_failure=on_member_failure
            )
            answers.append([])
            for i in range(6):  # the member can judge 23 tokens: 16 of the answer for the third prompt, and one more
                request = Request(endpoint, PROMPTS[2], replace(params(i), max_tokens=17))
                try:
                    (answer,) = engine.generate([request])
                    answers[-1].append(str(tokens(answer)))
                except UnavailableError as error:
                    answers[-1].append(str(error))
        engine.check()
    assert answers[0] == answers[1]
    assert all("no room" in answer for answer in answers[0]) == (on_member_failure == "fail")
