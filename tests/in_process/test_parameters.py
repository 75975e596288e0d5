"""Every parameter, in batches with requests that use others, with drafts and without: each text is as if alone.

The drafter is the target with a little noise in its weights, so that drafts are accepted and rejected.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.drafts.options import CorpusOptions, NgramOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model

EOS = 2
PROMPTS = [[(7 * i + 3 * j + i * j) % VOCAB for j in range(4 + i % 9)] for i in range(32)]

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.7},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0, "no_repeat_ngram_size": 2},
    {"temperature": 0, "bad_words_ids": ((3,), (5, 6), (9, 10, 11))},
    {"temperature": 0, "logit_bias": ((4, 5.0), (9, -100.0))},
    {"temperature": 0, "allowed_token_ids": tuple(range(10, 40))},
    {"temperature": 0, "min_tokens": 20, "logit_bias": ((EOS, 8.0),)},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"repetition_penalty": 0.6, "top_k": 20},
    {"frequency_penalty": -1.0},
    {"no_repeat_ngram_size": 3, "temperature": 1.5},
    {"suppress_tokens": (1, 2, 3), "begin_suppress_tokens": (4, 5)},
    {"forced_bos_token_id": 7, "forced_eos_token_id": EOS},
    {"stop_token_ids": (11, 12, 13)},
    {"stop_token_ids": (11, 12, 13), "min_tokens": 10},
    {"top_k": 10, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "temperature": 0.9},
    {"temperature": 0, "forced_bos_token_id": 5, "suppress_tokens": (8,)},
]


def params(setting: dict[str, Any], seed: int, **more: Any) -> SamplingParams:
    usual: dict[str, Any] = {"max_tokens": 24, "seed": seed, "eos_token_ids": (EOS,)}
    return SamplingParams(**usual | setting | more)


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return model


TARGET, DRAFTER = tiny_model("llama-gqa"), noisy(tiny_model("llama-gqa"))


class SlowRunner(Runner):
    """A runner so slow that drafts arrive in time."""

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        time.sleep(0.01)
        return super().logits(rows)


@contextmanager
def running(slots: int = 32, target: type[Runner] = SlowRunner) -> Iterator[Engine]:
    size: dict[str, Any] = {"slots": slots, "max_length": 128, "max_query": 64}
    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", target(TARGET, **size)),
        "drafter": ("drafter", Runner(DRAFTER, **size)),
    }
    with Engine(
        replicas, LoopOptions(adaptive=False, corpus=CorpusOptions(4096))
    ) as engine:  # for such small targets drafts never pay
        yield engine


def endpoint(**options: Any) -> Endpoint:
    usual: dict[str, Any] = {"name": "e", "target": "target", "drafter": "drafter", "draft_length": 4, "decode": text}
    return Endpoint(**usual | options)


def text(tokens: list[int]) -> str:
    return "".join(chr(64 + token) for token in tokens)


def mixed(**more: Any) -> list[Request]:
    return [
        Request(endpoint(), prompt, params(SETTINGS[i % len(SETTINGS)], i, **more), request_id=i)
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens(answers: Sequence[list[Delta]]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in answers]


def alone(requests: Sequence[Request]) -> list[list[int]]:
    """Return what a fresh engine without drafts writes for each, one request at a time."""
    plain = endpoint(drafter=None)
    with running(slots=1, target=Runner) as engine:
        return tokens([list(engine.stream(Request(plain, r.prompt, r.params))) for r in requests])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return alone(mixed())


def test_a_mixed_batch_of_32_with_drafts(expected: list[list[int]]) -> None:
    with running() as engine:
        answers = engine.generate(mixed())
    assert tokens(answers) == expected
    assert sum(answer[-1].statistics.accepted for answer in answers) > 32
    assert any(answer[-1].statistics.missed for answer in answers)


def test_a_mixed_batch_of_32_without_drafts(expected: list[list[int]]) -> None:
    requests = [Request(endpoint(drafter=None), r.prompt, r.params, request_id=r.request_id) for r in mixed()]
    with running() as engine:
        assert tokens(engine.generate(requests)) == expected


@pytest.mark.parametrize("corpus", [False, True])
@pytest.mark.parametrize("drafter", ["drafter", None])
def test_drafts_from_the_text_change_nothing(expected: list[list[int]], corpus: bool, drafter: str | None) -> None:
    where = endpoint(drafter=drafter, ngram=NgramOptions(), corpus=corpus)
    requests = [Request(where, r.prompt, r.params, request_id=r.request_id) for r in mixed()]
    with running() as engine:
        for _ in range(2):
            answers = engine.generate(requests)
            assert tokens(answers) == expected
    assert sum(answer[-1].statistics.drafted for answer in answers) > 0


def test_greedy_text_under_rejection_is_that_of_the_target(expected: list[list[int]]) -> None:
    requests = mixed(verification="rejection")
    with running() as engine:
        texts = tokens(engine.generate(requests))
    greedy = [i for i, request in enumerate(requests) if request.params.greedy]
    assert [texts[i] for i in greedy] == [expected[i] for i in greedy]


def test_drafts_are_accepted_under_rejection() -> None:
    setting = {"verification": "rejection", "max_tokens": 64, "eos_token_ids": ()}
    with running() as engine:
        requests = [Request(endpoint(), prompt, params(setting, i)) for i, prompt in enumerate(PROMPTS[:4])]
        statistics = [answer[-1].statistics for answer in engine.generate(requests)]
    accepted, drafted = sum(counts.accepted for counts in statistics), sum(counts.drafted for counts in statistics)
    assert accepted > drafted / 2 > 16


def test_a_draft_length_of_the_request() -> None:
    asked = [Request(endpoint(), PROMPTS[0], params({}, 1), draft_length=length) for length in (0, 2)]
    with running() as engine:
        none, some = engine.generate(asked)
    assert tokens([none]) == tokens([some])
    assert none[-1].statistics.drafted == 0
    assert 0 < some[-1].statistics.drafted <= 2 * some[-1].statistics.steps


@pytest.mark.parametrize("drafter", ["drafter", None])
@pytest.mark.parametrize("setting", [{"temperature": 0}, {"temperature": 0.8, "top_k": 12, "repetition_penalty": 1.4}])
def test_logprobs_are_those_of_a_plain_forward(drafter: str | None, setting: dict[str, Any]) -> None:
    asked = [
        Request(endpoint(drafter=drafter), prompt, params(setting, i, logprobs=3, prompt_logprobs=2), request_id=i)
        for i, prompt in enumerate(PROMPTS[:6])
    ]
    with running() as engine:
        answers = engine.generate(asked)
    for request, answer in zip(asked, answers, strict=True):
        generated = [logprob for delta in answer for logprob in delta.logprobs]
        prompt_found = answer[0].prompt_logprobs
        assert prompt_found is not None
        assert all(delta.prompt_logprobs is None for delta in answer[1:])
        written = [*request.prompt, *tokens([answer])[0]]
        assert [logprob.token for logprob in (*prompt_found, *generated)] == written[1:]
        with torch.no_grad():
            plain = TARGET(torch.tensor([written])).logits[0].log_softmax(-1)
        for position, logprob in enumerate((*prompt_found, *generated)):
            best = plain[position].topk(3 if position >= len(request.prompt) - 1 else 2)
            assert logprob.logprob == pytest.approx(plain[position, logprob.token].item(), abs=1e-4)
            assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert logprob.rank == 1 + sum(plain[position] > plain[position, logprob.token]).item()


def test_the_users_own_rule_ends_the_answer_within_a_draft(expected: list[list[int]]) -> None:
    seen: list[tuple[list[int], str]] = []

    def two_in_a_row(written: Sequence[int], shown: str) -> bool:
        seen.append((list(written), shown))
        return len(written) == 7

    request = Request(endpoint(criteria=(two_in_a_row,)), PROMPTS[0], params(SETTINGS[0], 0))
    with running() as engine:
        answer = list(engine.stream(request))
    assert tokens([answer])[0] == expected[0][:7]
    assert (answer[-1].finish, answer[-1].stop_reason) == ("stop", "two_in_a_row")
    assert seen[-1] == (expected[0][:7], text(expected[0][:7]))


def test_sources_tell_how_each_token_came() -> None:
    request = Request(endpoint(), PROMPTS[1], params({}, 1))
    with running() as engine:
        answer = list(engine.stream(request))
    sources = [token.source for delta in answer for token in delta.tokens]
    assert len(sources) == len(tokens([answer])[0])
    statistics = answer[-1].statistics
    assert sources.count("accepted") == statistics.accepted
    assert sources[:-1].count("recovered") <= statistics.missed  # nothing can follow the last, right or wrong
    assert set(sources) <= {"accepted", "recovered", "bonus", "plain"}


def test_an_answer_that_takes_too_long_ends_where_it_is() -> None:
    long = params({"temperature": 0}, 0, max_tokens=100, eos_token_ids=(), max_time_s=0.01)
    with running() as engine:
        answer = list(engine.stream(Request(endpoint(), PROMPTS[0], long)))
    assert (answer[-1].finish, answer[-1].stop_reason) == ("length", "max_time")
    assert answer[-1].statistics.committed < 100


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Return a random combination of settings."""
    while True:
        setting: dict[str, Any] = {}
        for part in rng.sample(SETTINGS, rng.randint(1, 4)):
            setting |= part
        setting |= {"temperature": rng.choice((0, 0, 0.5, 1.0, 2.0)), "min_tokens": rng.randint(0, 12)}
        try:
            return params(setting, seed, max_tokens=rng.randint(12, 24))
        except InvalidRequestError:
            continue


@pytest.mark.parametrize("seed", range(2))
def test_any_combination_is_the_same_with_drafts_and_without(seed: int) -> None:
    rng = random.Random(seed)
    settings = [random_params(rng, i) for i in range(len(PROMPTS))]
    texts = []
    for drafter, ngram in ((None, None), ("drafter", NgramOptions())):
        where = endpoint(drafter=drafter, ngram=ngram)
        with running() as engine:
            asked = [Request(where, prompt, setting) for prompt, setting in zip(PROMPTS, settings, strict=True)]
            texts.append(tokens(engine.generate(asked)))
    assert texts[0] == texts[1]
