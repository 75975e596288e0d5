"""Drafters with other tokenizers than the bundled target's: the text is the target's, and good drafts are accepted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.loops.row import LoadTokenizer
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.policy import SpeculationPolicy
from actors.wire.link import LocalLink
from decoding.sampling.params import SamplingParams, Structure
from decoding.tokenizers.draft_mapping import DraftMapping
from decoding.tokenizers.text_aligner import Speller
from engine.loading.tokenizers import speller_of, structure_tokenizer
from engine.model.runner import Runner
from tests.in_process.test_exactness import EOS, MIXED, Bundle, accepted, drafted, greedy, sampled
from tests.support import tokenizers
from tests.support.byte_level import byte_level_tokenizer
from tests.support.faulty_link import FaultyLink
from tests.support.knowing_runner import KnowingRunner
from tests.support.models import tiny_model
from tests.support.permuted import permutation, permuted_model, permuted_tokenizer
from tests.support.tokenizers import sentencepiece_tokenizer

pytestmark = pytest.mark.timeout(180)  # requests to a dead loop never end
COUNT = 8  # prompts
_PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle()


@pytest.fixture(scope="module")
def bundled(bundle: Bundle) -> Speller:
    return speller_of(bundle.tokenizer, bundle.target.config.vocab_size)


def runner(model: Any) -> Runner:
    return Runner(model, slots=16, max_length=512, max_query=256)


@contextmanager
def running(
    bundle: Bundle,
    drafter: Runner,
    draft_mapping: DraftMapping | None,
    load_tokenizer: LoadTokenizer | None = None,
    **more: Any,
) -> Iterator[Engine]:
    """The bundled target, which always wants drafts, and a drafter."""
    draft_mappings = {} if draft_mapping is None else {"target": draft_mapping}
    replicas: dict[str, tuple[Role, Runner]] = {
        "target": ("target", runner(bundle.target)),
        "drafter": ("drafter", drafter),
    }
    options = LoopOptions(adaptive=False, draft_mappings=draft_mappings, load_tokenizer=load_tokenizer)
    with Engine(replicas, options, **more) as engine:
        yield engine


def rate(answers: Sequence[list[Delta]]) -> float:
    return accepted(answers) / drafted(answers)


def outputs(answers: Sequence[list[Delta]]) -> list[list[int]]:
    return [[token for delta in answer for token in delta.token_ids] for answer in answers]


def without_drafts(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, speculate=False, request_id=100 + request.request_id) for request in requests]


def knowing(
    bundle: Bundle, bundled: Speller, tokenizer: Tokenizer, requests: Sequence[Request]
) -> tuple[Runner, DraftMapping]:
    """A drafter that knows the target's texts, in another tokenizer."""
    speller = tokenizers.speller_of(tokenizer)
    expected = bundle.expected([request.params for request in requests])
    texts = [bundled.vocabulary.decode_bytes([*r.prompt, *text]) for r, text in zip(requests, expected, strict=True)]
    return KnowingRunner(speller, texts), DraftMapping.build(bundled, speller)


def _wait_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps wait for whole drafts. Those that come late, as on a busy machine, are accepted less often."""
    monkeypatch.setattr(SpeculationPolicy, "_patience_s", lambda policy, draft_length: _PATIENCE_S)


def test_another_order_of_the_tokens_costs_little(
    bundle: Bundle, bundled: Speller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same token strings get the same noise; otherwise few sampled drafts would be accepted."""
    _wait_for_drafts(monkeypatch)
    order = permutation(bundled.vocabulary.size)
    speller = speller_of(permuted_tokenizer(bundle.tokenizer, order), len(order))
    requests = bundle.requests(sampled(COUNT, (0.7, 0, 1.0), (1.0, 0, 1.0)))
    with running(bundle, runner(bundle.drafter), None) as engine:
        plain = engine.generate(requests)
    permuted = runner(permuted_model(bundle.drafter, order))
    with running(bundle, permuted, DraftMapping.build(bundled, speller, begins_texts=True)) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert rate(answers) > 0.75 * rate(plain)


@pytest.mark.parametrize(
    ("tokenizer", "settings"),
    [(sentencepiece_tokenizer, ((0, 0, 1.0),)), (sentencepiece_tokenizer, MIXED), (byte_level_tokenizer, MIXED)],
    ids=["sentencepiece greedy", "sentencepiece mixed", "byte level mixed"],
)
def test_what_another_tokenizer_drafts_is_accepted(
    bundle: Bundle,
    bundled: Speller,
    tokenizer: Any,
    settings: tuple[tuple[float, int, float], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _wait_for_drafts(monkeypatch)
    requests = bundle.requests(sampled(COUNT, *settings))
    with running(bundle, *knowing(bundle, bundled, tokenizer(), requests)) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert rate(answers) > 0.75


def test_a_useless_drafter_changes_nothing(bundle: Bundle, bundled: Speller) -> None:
    speller = tokenizers.speller_of(sentencepiece_tokenizer())
    model = tiny_model("llama-gqa", vocab_size=speller.vocabulary.size, max_position_embeddings=512)
    requests = bundle.requests(sampled(COUNT, *MIXED))
    with running(bundle, runner(model), DraftMapping.build(bundled, speller)) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert drafted(answers) > 0


def test_lost_late_and_repeated_messages_change_nothing(bundle: Bundle, bundled: Speller) -> None:
    links: list[FaultyLink] = []

    def wrap(link: LocalLink) -> LocalLink:
        links.append(FaultyLink(link, seed=1, commits=link.name == "coordinator"))
        return links[-1]

    requests = bundle.requests(sampled(COUNT, *MIXED))
    drafter, draft_mapping = knowing(bundle, bundled, sentencepiece_tokenizer(), requests)
    with running(bundle, drafter, draft_mapping, wrap_link=wrap) as engine:
        answers = engine.generate(requests)
    bundle.check(requests, answers)
    assert accepted(answers) > COUNT
    assert sum(sum(link.faults.values()) for link in links) > COUNT


PARAMETERS: list[dict[str, Any]] = [
    {"logit_bias": ((300, 5.0), (301, -100.0))},
    {"repetition_penalty": 1.3, "min_p": 0.05},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3},
    {"bad_words_ids": ((291,), (310, 320)), "suppress_tokens": (269,)},
    {"allowed_token_ids": tuple(range(6, 1500))},
    {"forced_bos_token_id": 400, "forced_eos_token_id": EOS, "min_tokens": 20},
    {"stop_token_ids": (13,), "begin_suppress_tokens": (291,)},
    {"typical_p": 0.8, "min_tokens": 28},
]


def test_every_parameter_gives_what_it_gives_without_drafts(bundle: Bundle, bundled: Speller) -> None:
    """Parameters with the target's token ids are included."""
    basic = [*sampled(4, (0.8, 0, 1.0)), *greedy(4)]
    requests = bundle.requests([replace(setting, **more) for setting, more in zip(basic, PARAMETERS, strict=True)])
    drafter, draft_mapping = knowing(bundle, bundled, sentencepiece_tokenizer(), bundle.requests(basic))
    with running(bundle, drafter, draft_mapping) as engine:
        answers = engine.generate(requests)
        plain = engine.generate(without_drafts(requests))
    assert outputs(answers) == outputs(plain)
    assert accepted(answers) > 0
    assert drafted(plain) == 0


def test_structured_answers_are_what_they_are_without_drafts(bundle: Bundle, bundled: Speller) -> None:
    structure = Structure(
        kind="regex", definition="def [a-z_]{1,12}\\([a-z]{0,8}\\):\\n    return [a-z0-9 +*]{1,20}\\n"
    )
    common = SamplingParams(max_tokens=48, eos_token_ids=(EOS,), structure=structure)
    requests = bundle.requests([replace(common, temperature=float(i % 2), seed=i) for i in range(4)])
    drafter, draft_mapping = knowing(bundle, bundled, sentencepiece_tokenizer(), bundle.requests(greedy(4)))
    with running(
        bundle, drafter, draft_mapping, load_tokenizer=lambda: structure_tokenizer(bundle.tokenizer)
    ) as engine:
        answers = engine.generate(requests)
        plain = engine.generate(without_drafts(requests))
    assert outputs(answers) == outputs(plain)


def test_rejection_sampling_takes_its_drafts_for_guesses(bundle: Bundle, bundled: Speller) -> None:
    """The drafter drafts greedily and sends no distributions, because only that is unbiased."""
    basic = sampled(COUNT, (0.2, 0, 1.0))
    requests = bundle.requests([replace(params, verification="rejection") for params in basic])
    drafter, draft_mapping = knowing(bundle, bundled, sentencepiece_tokenizer(), bundle.requests(greedy(COUNT)))
    assert draft_mapping.params(requests[0].params, 512).greedy
    with running(bundle, drafter, draft_mapping) as engine:
        answers = engine.generate(requests)
    assert accepted(answers) > COUNT
    assert all(answer[-1].finish for answer in answers)
