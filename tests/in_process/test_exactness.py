"""Test number one: the text is the target's own, whatever drafts, faults, batches and timing do.

Compared with Hugging Face `generate` on the bundled target in float32. Nothing here is statistical.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from actors.coordinator.request import Delta, Endpoint, Request
from actors.drafter.loop import Drafter
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.wire.link import Link, LocalLink
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support import reference
from tests.support.adversary import AdversarialDrafter
from tests.support.faulty_link import FaultyLink
from tests.support.waiting import wait_until, wait_until_idle

MODELS = Path("models")
pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
EOS = 2
FEW, SOME, MANY = 24, 48, 200  # prompts
MAX_TOKENS = 32


class Bundle:
    """The bundled pair in float32, its tokenizer, the held-out prompts, and the texts the target writes alone."""

    def __init__(self) -> None:
        self.target: PreTrainedModel = load("target")
        self.drafter: PreTrainedModel = load("drafter")
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODELS / "target")
        lines = (MODELS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
        self.prompts = [self.tokenizer(json.loads(line)["prompt"]).input_ids for line in lines[:MANY]]
        self._expected: dict[tuple[int, SamplingParams], list[int]] = {}

    def expected(self, params: Sequence[SamplingParams]) -> list[list[int]]:
        """Return what `generate` writes for the first prompts, one per params."""
        wanted = list(enumerate(params))
        missing = [key for key in wanted if key not in self._expected]
        prompts, left = [self.prompts[i] for i, _ in missing], [setting for _, setting in missing]
        self._expected.update(zip(missing, reference.generate(self.target, prompts, left), strict=True))
        return [self._expected[key] for key in wanted]

    def requests(
        self, params: Sequence[SamplingParams], *, draft_length: int = 4, drafter: str | None = "drafter"
    ) -> list[Request]:
        """Return requests for the first prompts. Their ids are fixed, so that faults are reproducible."""
        endpoint = Endpoint("test", "target", drafter, draft_length, self.decode)
        return [
            Request(endpoint, prompt, setting, request_id=i)
            for i, (prompt, setting) in enumerate(zip(self.prompts, params, strict=False))
        ]

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def check(self, requests: Sequence[Request], answers: Sequence[list[Delta]]) -> None:
        """Check the answers' tokens against `generate`, and their text and finish reason against the tokens."""
        params = [request.params for request in requests]
        outputs = [[token for delta in answer for token in delta.token_ids] for answer in answers]
        reference.assert_same(self.target, self.prompts[: len(params)], params, outputs, self.expected(params))
        for answer, output in zip(answers, outputs, strict=True):
            assert "".join(delta.text for delta in answer) == self.decode(output)
            assert answer[-1].finish == ("stop" if output[-1] == EOS else "length")
            assert answer[-1].statistics.committed == len(output)


def load(name: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle()


@contextmanager
def running(
    bundle: Bundle,
    *,
    slots: int = 16,
    prefill_chunk: int = 256,
    adversary_for: Sequence[Request] | None = None,
    adaptive: bool = False,
    **options: Any,
) -> Iterator[Engine]:
    """An engine over the pair; with `adversary_for`, an adversarial drafter for these requests."""

    def make_drafter(runner: Runner, link: Link, options: LoopOptions) -> Drafter | AdversarialDrafter:
        if adversary_for is None:
            return Drafter(runner, link, options)
        expected = bundle.expected([request.params for request in adversary_for])
        texts = {r.request_id: [*r.prompt, *text] for r, text in zip(adversary_for, expected, strict=True)}
        return AdversarialDrafter(link, texts, vocab_size=runner.vocab_size, seed=1)

    def runner(model: PreTrainedModel) -> Runner:
        return Runner(model, slots=slots, max_length=256, max_query=prefill_chunk)

    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", runner(bundle.target)),
        "drafter": ("drafter", runner(bundle.drafter)),
    }
    with mock.patch("actors.replica.roles.Drafter", make_drafter):
        engine = Engine(replicas, LoopOptions(prefill_chunk=prefill_chunk, adaptive=adaptive), **options)
    with engine:
        yield engine


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=MAX_TOKENS, temperature=0, eos_token_ids=(EOS,))] * count


def sampled(count: int, *settings: tuple[float, int, float]) -> list[SamplingParams]:
    """Seeds 100, 101, …; the settings (temperature, top_k, top_p) repeat."""
    return [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, top_k=top_k, top_p=top_p, seed=100 + i, eos_token_ids=(EOS,)
        )
        for i, (temperature, top_k, top_p) in zip(range(count), settings * count, strict=False)
    ]


MIXED = ((0.7, 0, 1.0), (1.0, 0, 1.0), (0, 0, 1.0), (1.0, 50, 1.0), (0.7, 0, 0.9), (1.0, 20, 0.95))


def accepted(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.accepted for answer in answers)


def drafted(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.drafted for answer in answers)


@pytest.mark.parametrize("count", [SOME, pytest.param(MANY, marks=pytest.mark.slow)])
def test_greedy_text_is_that_of_generate(bundle: Bundle, count: int) -> None:
    requests = bundle.requests(greedy(count))
    with running(bundle) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted(answers) > count


def test_greedy_text_without_a_drafter(bundle: Bundle) -> None:
    requests = bundle.requests(greedy(FEW), drafter=None)
    with running(bundle) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert drafted(answers) == 0


def test_greedy_text_with_an_adversarial_drafter(bundle: Bundle) -> None:
    requests = bundle.requests(greedy(FEW))
    with running(bundle, adversary_for=requests) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert 0 < accepted(answers) < 0.9 * drafted(answers)


def test_greedy_text_with_goodput_control(bundle: Bundle) -> None:
    requests = bundle.requests(greedy(FEW))
    with running(bundle, adaptive=True) as engine:
        bundle.check(requests, engine.generate(requests))


@pytest.mark.parametrize("setting", MIXED, ids=str)
def test_sampled_text_alone(bundle: Bundle, setting: tuple[float, int, float]) -> None:
    requests = bundle.requests(sampled(2, setting))
    with running(bundle) as engine:
        answers = [list(engine.stream(request)) for request in requests]
    bundle.check(requests, answers)
    assert accepted(answers) > 0


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("drafter", ["drafter", None])
def test_sampled_text_in_mixed_batches(bundle: Bundle, count: int, drafter: str | None) -> None:
    requests = bundle.requests(sampled(count, *MIXED), drafter=drafter)
    with running(bundle) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert (accepted(answers) > 0) == (drafter is not None)


@pytest.mark.parametrize(("commits", "seed"), [(False, 1), (True, 2)], ids=["offers", "offers and commits"])
def test_sampled_text_under_faults(bundle: Bundle, commits: bool, seed: int) -> None:
    links: list[FaultyLink] = []

    def wrap(link: LocalLink) -> LocalLink:
        links.append(FaultyLink(link, seed=seed, commits=commits and link.name != "target"))
        return links[-1]

    requests = bundle.requests(sampled(16, *MIXED))
    with running(bundle, wrap_link=wrap) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted(answers) > 0
    kinds = ["Offer", "Advance", "Commit"] if commits else ["Offer"]
    faults = sum((link.faults for link in links), Counter[str]())
    assert all(faults[f"{fate} {kind}"] > 0 for fate in ("drop", "double", "delay") for kind in kinds)


def test_sampled_text_with_an_adversarial_drafter(bundle: Bundle) -> None:
    requests = bundle.requests(sampled(16, *MIXED))
    with running(bundle, adversary_for=requests) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert 0 < accepted(answers) < drafted(answers)


@pytest.mark.parametrize(
    ("draft_length", "prefill_chunk", "slots"), [(1, 256, 16), (8, 256, 16), (4, 16, 16), (8, 16, 3), (30, 64, 1)]
)
def test_other_draft_lengths_small_chunks_and_few_slots(
    bundle: Bundle, draft_length: int, prefill_chunk: int, slots: int
) -> None:
    requests = bundle.requests(sampled(8 if slots > 4 else 4, *MIXED), draft_length=draft_length)
    with running(bundle, prefill_chunk=prefill_chunk, slots=slots) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted(answers) > 0


def test_cancelled_requests_leave_the_others_alone_and_free_their_slots(bundle: Bundle) -> None:
    requests = bundle.requests(sampled(16, *MIXED))
    answers: list[list[Delta]] = [[] for _ in requests]
    with running(bundle, slots=5) as engine:

        def sink(i: int, delta: Delta) -> None:
            answers[i].append(delta)
            if i % 3 == 0:
                engine.coordinator.cancel(requests[i].request_id)

        for i, request in enumerate(requests):
            engine.coordinator.submit(request, partial(sink, i))
        kept = [i for i in range(len(requests)) if i % 3]
        wait_until(lambda: all(answers[i] and answers[i][-1].finish for i in kept), "the answers", timeout_s=60)
        wait_until(lambda: all(answers[i] for i in range(len(requests))), "a beginning of the others")
        wait_until_idle(engine)
    params = [request.params for request in requests]
    expected = bundle.expected(params)
    outputs = [[token for delta in answer for token in delta.token_ids] for answer in answers]
    for i, output in enumerate(outputs):
        if i not in kept:
            assert len(output) < MAX_TOKENS
            expected[i], outputs[i] = expected[i][: len(output)], output
    reference.assert_same(bundle.target, bundle.prompts[: len(params)], params, outputs, expected)
