"""Ensembles with other tokenizers write what a slow loop over strings writes, with drafts and without."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.blending.blend import blend
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.logits_mapping import LogitsMapping
from engine.loading.tokenizers import speller_of
from engine.model.runner import Runner
from tests.in_process.test_ensemble import SlowRunner, tokens
from tests.in_process.test_exactness import EOS, Bundle
from tests.support import tokenizers
from tests.support.byte_level import byte_level_tokenizer_with_end
from tests.support.models import tiny_model
from tests.support.permuted import permutation, permuted_model, permuted_tokenizer
from tests.support.slow_member import SlowMember
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_tokenizer, unigram_tokenizer

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
BEST, TOKENS = 6, 12


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle()


def opinionated(tokenizer: Tokenizer) -> PreTrainedModel:
    """Return a random model with peaked distributions."""
    vocabulary = tokenizers.vocabulary_of(tokenizer)
    model = tiny_model("llama-gqa", vocab_size=vocabulary.size, max_position_embeddings=512)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12)
    return model


@contextmanager
def running(
    bundle: Bundle, member: PreTrainedModel, logits_mapping: LogitsMapping, *, max_query: int = 256
) -> Iterator[Engine]:
    """The bundled target leads, the bundled drafter drafts."""
    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", SlowRunner(bundle.target, slots=16, max_length=256, max_query=256)),
        "other": ("target", Runner(member, slots=16, max_length=400, max_query=max_query)),
        "drafter": ("drafter", Runner(bundle.drafter, slots=16, max_length=256, max_query=256)),
    }
    options = LoopOptions(prefill_chunk=min(max_query, 32), adaptive=False)
    own_options = {"other": replace(options, logits_mappings={"target": logits_mapping})}
    with Engine(replicas, options, own_options=own_options) as engine:
        yield engine


def endpoint(bundle: Bundle, vocabulary: Any, blend: BlendParams, *, drafts: bool = True) -> Endpoint:
    options = EnsembleOptions(blend=blend, vocabulary=vocabulary, vocabulary_top_k=BEST)
    return Endpoint("e", "target", "drafter" if drafts else None, 6, bundle.decode, members=["other"], ensemble=options)


def accepted(answers: Sequence[list[Delta]]) -> int:
    return sum(answer[-1].statistics.accepted for answer in answers)


def settings(count: int, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=TOKENS, temperature=(0.0, 1.0, 0.7)[i % 3], seed=i, eos_token_ids=(EOS,), **more)
        for i in range(count)
    ]


# Members that are copies of the leader with permuted tokens

COPIES = [
    ("union", BlendParams(kind="mixture")),
    ("union", BlendParams(kind="vote")),
    ("union", BlendParams(kind="gated")),
    ("topk_union", BlendParams(kind="mixture", weights=(0.1, 0.9))),
    ("topk_union", BlendParams(kind="product")),
]


def test_a_copy_with_its_tokens_in_another_order_changes_nothing(bundle: Bundle) -> None:
    order = permutation(bundle.target.config.vocab_size)
    turned = permuted_tokenizer(bundle.tokenizer, order)
    logits_mapping = LogitsMapping.build(
        *(speller_of(tokenizer, len(order)) for tokenizer in (bundle.tokenizer, turned))
    )
    assert logits_mapping.copies
    endpoints = [endpoint(bundle, *case) for case in COPIES]
    params = settings(len(COPIES), top_k=BEST)  # a union of the best tokens leaves no others
    requests = [
        Request(endpoints[i % len(COPIES)], prompt, setting, request_id=i)
        for i, (prompt, setting) in enumerate(zip(bundle.prompts, params, strict=False))
    ]
    with running(bundle, permuted_model(bundle.target, order), logits_mapping) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted(answers) > 0
    for answer in answers:
        leader, other = answer[-1].members or []
        assert (leader.agreement, leader.tokens) == (other.agreement, other.tokens)


# Members with other token strings

CASES = [
    ("union", BlendParams(kind="mixture", weights=(3, 1))),
    ("union", BlendParams(kind="mixture")),
    ("union", BlendParams(kind="vote", weights=(1, 1))),
    ("union", BlendParams(kind="gated", threshold=0.6)),
    ("topk_union", BlendParams(kind="mixture", weights=(3, 1))),
    ("topk_union", BlendParams(kind="product", weights=(4, 1))),
    ("topk_union", BlendParams(kind="vote", weights=(1, 1))),
    ("topk_union", BlendParams(kind="contrastive")),
    ("topk_union", BlendParams(kind="contrastive", form="scaled", beta=0.3)),
]


def check(bundle: Bundle, member: SlowMember, request: Request, answer: Sequence[int]) -> None:
    """Check each token, with one plain forward of the leader and one of the member per token."""
    params, options = request.params, request.endpoint.ensemble
    text = [*request.prompt, *answer]
    with torch.no_grad():
        leader = bundle.target(torch.tensor([text])).logits[0]
    for position in range(len(request.prompt), len(text)):
        scores = _target(leader[position - 1], member.say(text[:position], options.best_count), options)
        if params.temperature:
            key = torch.tensor([noise_key(params.seed, position)], dtype=torch.int32)
            scores = scores / params.temperature + gumbel(key, len(scores))[0]
        assert text[position] == int(scores.argmax()), (
            options.blend.kind,
            options.vocabulary,
            position - len(request.prompt),
        )
    assert len(answer) == params.max_tokens or answer[-1] in params.eos_token_ids


def _target(own: Tensor, answer: tuple[Tensor, list[int]] | None, options: EnsembleOptions) -> Tensor:
    if answer is None:
        return own
    other = answer[0].float()
    if options.best_count:
        chosen = {*own.topk(options.best_count).indices.tolist(), *answer[1]}
        ruled_out = torch.tensor([token not in chosen for token in range(len(own))])
        own, other = (logits.masked_fill(ruled_out, -math.inf) for logits in (own, other))
    if other.amax() == -math.inf:
        other = torch.zeros_like(own) if options.blend.kind == "contrastive" else own
    return blend(torch.stack([own, other])[:, None], [(options.blend, [True, True])])[0]


@pytest.mark.parametrize(
    ("tokenizer", "max_query"),
    [
        pytest.param(sentencepiece_tokenizer, 64, id="sentencepiece"),
        pytest.param(byte_level_tokenizer_with_end, 16, id="byte level", marks=pytest.mark.slow),
        pytest.param(unigram_tokenizer, 64, id="unigram", marks=pytest.mark.slow),
    ],
)
def test_blends_are_those_of_strings_with_drafts_and_without(
    bundle: Bundle, tokenizer: Callable[[], Tokenizer], max_query: int
) -> None:
    """With small steps, even short readings take several."""
    model = opinionated(tokenizer())
    member = SlowMember(model, tokenizer(), bundled_tokenizer())
    logits_mapping = LogitsMapping.build(
        *(tokenizers.speller_of(tokenizer) for tokenizer in (bundled_tokenizer(), tokenizer()))
    )
    params = settings(len(CASES))
    requests = [
        Request(endpoint(bundle, *CASES[i % len(CASES)]), prompt, setting)
        for i, (prompt, setting) in enumerate(zip(bundle.prompts, params, strict=False))
    ]
    with running(bundle, model, logits_mapping, max_query=max_query) as engine:
        answers = engine.generate(requests)
        plain = engine.generate(
            [replace(request, speculate=False, request_id=100 + i) for i, request in enumerate(requests)]
        )
    texts = [tokens(answer) for answer in plain]
    assert [tokens(answer) for answer in answers] == texts
    assert accepted(answers) > accepted(plain) == 0
    for request, answer in zip(requests, texts, strict=True):
        check(bundle, member, request, answer)
