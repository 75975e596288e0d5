"""Formulas write what a slow loop over plain forwards of their terms writes, and what transformers does."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.coordinator.request import Endpoint, Request, Term
from actors.loops.options import LoopOptions
from actors.loops.row import RowKey
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from actors.verifier.inbox import TargetInbox
from decoding.beams.options import BeamOptions
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.in_process.test_ensemble import MODELS, PROMPTS, SlowRunner, running, tokens
from tests.in_process.test_parameters import text as characters
from tests.support.models import VOCAB
from tests.support.waiting import wait_until_idle

NEGATIVE = [[(7 * i + 2 * j) % VOCAB for j in range(1 + 4 * i)] for i in range(8)]
Formula = Callable[[Tensor], Tensor]  # of the terms' log-probabilities, [M, V] or [M, N, V]


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=(0, 0.8)[i % 2], seed=i, **more)


def guidance(scale: float, negative: Sequence[int], **options: Any) -> dict[str, Any]:
    blend = BlendParams(kind="formula", weights=(scale, 1 - scale), alpha=0.0)
    terms = [Term(name="negative prompt", is_own=True, prompt=tuple(negative))]
    return {"ensemble": EnsembleOptions(blend=blend, **options), "terms": terms}


def guided(scale: float) -> Formula:
    """Sanchez et al., arXiv 2306.17806, as transformers computes it."""
    return lambda log_probs: scale * (log_probs[0] - log_probs[1]) + log_probs[1]


def weighted(weights: Sequence[float], alpha: float = 0.0) -> Formula:
    def add_up(log_probs: Tensor) -> Tensor:
        total = sum((weight * term for weight, term in zip(weights, log_probs, strict=True)), torch.zeros(()))
        least = log_probs[0].amax(dim=-1, keepdim=True) + (math.log(alpha) if alpha else -math.inf)
        return total.masked_fill(log_probs[0] < least, -math.inf)

    return add_up


def plain(drafter: str | None = None) -> Endpoint:
    return Endpoint("p", "first", drafter, 4, decode=str)


@torch.no_grad()
def reference(
    terms: Sequence[tuple[str, Sequence[int]]], formula: Formula, params: SamplingParams, *, length: int | None = None
) -> list[int]:
    """Write a text with one plain forward of each term per token. terms: models and prompts; the first's own is first.

    length: of the prompt by which noise is numbered, if it is not the first one.
    """
    answer: list[int] = []
    for _ in range(params.max_tokens):
        logits = [MODELS[name](torch.tensor([[*prompt, *answer]])).logits[0, -1] for name, prompt in terms]
        scores = formula(torch.stack(logits).log_softmax(dim=-1))
        if params.temperature:
            key = torch.tensor([noise_key(params.seed, len(terms[0][1]) + len(answer))], dtype=torch.int32)
            scores = scores / params.temperature + gumbel(key, VOCAB)[0]
        answer.append(int(scores.argmax()))
    return answer


@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_guidance_is_that_of_plain_forwards(drafter: str | None) -> None:
    cases = [*zip(PROMPTS, NEGATIVE, (1.5, 3.0, 0.5, 1.0, 2.0, 0.0, 1.5, 1.2), strict=True)]
    expected = [
        reference([("first", prompt), ("first", negative)], guided(scale), params(i))
        for i, (prompt, negative, scale) in enumerate(cases)
    ]
    requests = [
        Request(plain(drafter), prompt, params(i), **guidance(scale, negative))
        for i, (prompt, negative, scale) in enumerate(cases)
    ]
    with running(runner=SlowRunner if drafter else Runner) as engine:
        answers = engine.generate(requests)
        wait_until_idle(engine)
    assert [tokens(answer) for answer in answers] == expected
    assert (sum(answer[-1].statistics.accepted for answer in answers) > 0) == (drafter is not None)


def test_guidance_is_that_of_transformers() -> None:
    """Greedy, with a negative prompt and with the default: the last token of the prompt."""
    model: Any = MODELS["first"]
    greedy = SamplingParams(max_tokens=16, temperature=0, eos_token_ids=(model.generation_config.eos_token_id,))
    cases = [(p, negative) for p, given in zip(PROMPTS, NEGATIVE, strict=True) for negative in (given, None)]
    with running() as engine:
        requests = [Request(plain(), p, greedy, **guidance(1.8, negative or p[-1:])) for p, negative in cases]
        answers = engine.generate(requests)
    for (prompt, negative), answer in zip(cases, answers, strict=True):
        ids = None if negative is None else torch.tensor([negative])
        options = {"guidance_scale": 1.8, "negative_prompt_ids": ids, "do_sample": False, "max_new_tokens": 16}
        with torch.no_grad():
            written = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert tokens(answer) == written.tolist()


def test_terms_of_one_model_run_in_one_forward_and_share_pages() -> None:
    """A step computes the last token of both texts. The second prompt is computed from where it differs."""
    ran: list[list[int]] = []  # of each forward, the tokens of its rows

    class Counted(Runner):
        def logits(self, rows: Sequence[RowInput]) -> Tensor:
            ran.append([len(row.tokens) for row in rows])
            return super().logits(rows)

    shared = [(3 * i) % VOCAB for i in range(48)]
    with running(runner=Counted) as engine:
        ran.clear()
        request = Request(plain(), [*shared, 5, 6, 7], params(0), **guidance(1.5, [*shared, 9]))
        list(engine.stream(request))
    steps = [counts for counts in ran if counts == [1, 1]]
    assert len(steps) == 16
    assert sum(map(sum, ran)) - 2 * len(steps) == 48 + 2
    assert max(len(counts) for counts in ran) == 2


def test_a_guided_row_is_preempted_and_moves_with_its_companion() -> None:
    """Few pages: rows make room for each other, and begin again with both of their texts."""
    cases = [*zip(PROMPTS[4:], NEGATIVE[4:], strict=True)]
    long = [replace(params(i), max_tokens=32) for i in range(len(cases))]
    requests = [Request(plain(), p, each, **guidance(1.5, n)) for each, (p, n) in zip(long, cases, strict=True)]
    expected = [
        reference([("first", p), ("first", n)], guided(1.5), each) for each, (p, n) in zip(long, cases, strict=True)
    ]
    runner = Runner(MODELS["first"], slots=6, max_length=64, max_query=16, pages=10)
    with Engine({"first": ("target", runner)}, LoopOptions(prefill_chunk=8, adaptive=False)) as engine:
        answers = engine.generate(requests)
        wait_until_idle(engine)
        used = engine.loops["first"].load().used_pages
    assert [tokens(answer) for answer in answers] == expected
    assert sum(answer[-1].statistics.preemptions for answer in answers) > 0
    assert used == 0


def test_answers_tell_what_each_term_made_of_a_token() -> None:
    options = guidance(1.5, NEGATIVE[2], report_contributions=True)
    with running() as engine:
        answer = list(engine.stream(Request(plain(), PROMPTS[2], params(1), **options)))
    shares = answer[-1].members
    assert shares is not None
    assert [(share.model, share.weight, share.tokens) for share in shares] == [
        ("first", 1.5, 16),
        ("negative prompt", -0.5, 16),
    ]
    text = tokens(answer)
    with torch.no_grad():
        logits = MODELS["first"](torch.tensor([[*NEGATIVE[2], *text]])).logits[0, len(NEGATIVE[2]) - 1 : -1]
    own = logits.log_softmax(dim=-1)[torch.arange(16), text].tolist()
    views = [token.views for delta in answer for token in delta.tokens]
    assert [view[1].logprob for view in views] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("by_string", [False, True])
@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_terms_are_counted_for_the_answers_tokens_alone(drafter: str | None, by_string: bool) -> None:
    """Not for draft tokens after the one that ends it, though the target would have written them."""
    cases = [*zip(PROMPTS, NEGATIVE, strict=True)]
    texts = [reference([("first", p), ("first", n)], guided(1.5), params(0)) for p, n in cases]
    written = [text[: text.index(text[9]) + 1] for text in texts]

    where = replace(plain(drafter), decode=characters)

    def ends(token: int) -> dict[str, Any]:
        return {"stop": (characters([token]),)} if by_string else {"eos_token_ids": (token,)}

    requests = [
        Request(where, prompt, params(0, **ends(text[-1])), **guidance(1.5, negative))
        for (prompt, negative), text in zip(cases, written, strict=True)
    ]
    with running(runner=SlowRunner if drafter else Runner) as engine:
        answers = engine.generate(requests)
    for prompts, text, answer in zip(cases, written, answers, strict=True):
        assert tokens(answer) == text
        for share, prompt in zip(answer[-1].members or (), prompts, strict=True):
            with torch.no_grad():
                logits = MODELS["first"](torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
            agreement = (logits.argmax(dim=-1) == torch.tensor(text)).float().mean().item()
            assert share.tokens == len(text)
            assert share.agreement == pytest.approx(agreement)


@pytest.mark.parametrize("drafter", [None, "second"])
def test_terms_of_other_models_may_have_prompts_of_their_own(drafter: str | None) -> None:
    """DExperts, and own + 2 · second − ½ · third − ½ · own, the last two after another prompt."""
    expected, requests = [], []
    experts = Term(name="second"), Term(name="third")
    for i, (prompt, negative) in enumerate(zip(PROMPTS[:4], NEGATIVE[2:6], strict=True)):
        mixed = (
            Term(name="second"),
            Term(name="third", prompt=tuple(negative)),
            Term(name="negative", is_own=True, prompt=tuple(negative)),
        )
        for terms, weights in ((experts, (1.0, 1.0, -1.0)), (mixed, (1.0, 2.0, -0.5, -0.5))):
            models = [("first" if term.is_own else term.name, term.prompt or prompt) for term in terms]
            expected.append(reference([("first", prompt), *models], weighted(weights), params(i)))
            options = EnsembleOptions(blend=BlendParams(kind="formula", weights=weights, alpha=0.0))
            requests.append(Request(plain(drafter), prompt, params(i), ensemble=options, terms=terms))
    with running(runner=SlowRunner if drafter else Runner, both=drafter or "") as engine:
        answers = engine.generate(requests)
        wait_until_idle(engine)
    assert [tokens(answer) for answer in answers] == expected
    assert (sum(answer[-1].statistics.accepted for answer in answers) > 0) == (drafter is not None)


LAYERS = (0, 1, 2)
OWN = Term(name="own", is_own=True)


@pytest.fixture(scope="module")
def early() -> Iterator[Engine]:
    runner = SlowRunner(MODELS["first"], slots=8, max_length=64, max_query=16)
    runner.use_early_exits(LAYERS)
    drafter = Runner(MODELS["drafter"], slots=8, max_length=64, max_query=16)
    replicas: dict[str, tuple[Role, Runner]] = {"first": ("target", runner), "drafter": ("drafter", drafter)}
    with Engine(replicas, LoopOptions(prefill_chunk=8, adaptive=False)) as engine:
        yield engine


def choose(scores: Tensor, params: SamplingParams, length: int) -> list[int]:
    """Return the best token at each position, with noise if it is drawn. scores: [N, V]; length: of the prompt."""
    if params.temperature:
        keys = torch.tensor([noise_key(params.seed, length + index) for index in range(len(scores))], dtype=torch.int32)
        scores = scores / params.temperature + gumbel(keys, VOCAB)
    return scores.argmax(dim=-1).tolist()


@torch.no_grad()
def choices(
    terms: Sequence[tuple[str, Sequence[int]]], formula: Formula, params: SamplingParams, answer: Sequence[int]
) -> list[int]:
    """Return what is chosen at each position of an answer after the tokens before it: one forward of each term."""
    texts = [(MODELS[name](torch.tensor([[*prompt, *answer]])).logits[0], len(prompt)) for name, prompt in terms]
    logits = torch.stack([logits[length - 1 : -1] for logits, length in texts])
    return choose(formula(logits.log_softmax(dim=-1)), params, len(terms[0][1]))


@torch.no_grad()
def dola(prompt: Sequence[int], layers: Sequence[int], params: SamplingParams, answer: Sequence[int]) -> list[int]:
    """Chuang et al., arXiv 2309.03883: log q_N − log q_M on plausible tokens; M differs most from N by divergence."""
    model: Any = MODELS["first"]
    text = model(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
    last = text.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    states = [text.hidden_states[layer][0, len(prompt) - 1 : -1] for layer in layers]
    exits = torch.stack([model.lm_head(model.model.norm(state)).double().log_softmax(-1) for state in states])
    mean = ((last.exp() + exits.exp()) / 2).log()
    divergences = (last.exp() * (last - mean)).sum(-1) + (exits.exp() * (exits - mean)).sum(-1)  # [L, N]
    early = exits[divergences.argmax(dim=0), torch.arange(len(last))]
    implausible = last < last.amax(dim=-1, keepdim=True) + math.log(0.1)
    return choose((last - early).masked_fill(implausible, -math.inf).float(), params, len(prompt))


@pytest.mark.parametrize("drafter", [None, "drafter"])
@pytest.mark.parametrize("layers", [LAYERS, (1,)])
def test_layers_are_contrasted_as_plain_forwards_do(early: Engine, drafter: str | None, layers: Any) -> None:
    options = EnsembleOptions(blend=BlendParams(kind="formula", weights=(1, -1), alpha=0.1))
    terms = [Term(name="layers", is_own=True, layers=layers)]
    cases = [*enumerate(PROMPTS[:4])]
    answers = early.generate([Request(plain(drafter), p, params(i), ensemble=options, terms=terms) for i, p in cases])
    for (i, prompt), answer in zip(cases, answers, strict=True):
        assert tokens(answer) == dola(prompt, layers, params(i), tokens(answer))
    assert (sum(answer[-1].statistics.accepted for answer in answers) > 0) == (drafter is not None)


SUMS: dict[str, tuple[tuple[float, ...], float, Sequence[Term]]] = {  # weights, alpha, and the terms without prompts
    "guidance": ((1.5, -0.5), 0.0, [OWN]),
    "context_aware": ((1.5, -0.5), 0.0, [OWN]),
    "proxy": ((1.0, 1.0, -1.0), 0.0, [Term(name="second"), Term(name="third")]),
    "contrastive": ((1.5, -0.5), 0.1, [Term(name="second")]),
    "average": ((0.5, 0.5), 0.0, [Term(name="second")]),
    "mixed": ((1.0, 0.7, -0.4, 0.2), 0.05, [Term(name="second"), OWN, Term(name="third")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "drafter"])
@pytest.mark.parametrize("kind", SUMS)
def test_fifty_texts_of_forty_tokens(kind: str, drafter: str | None) -> None:
    """Half of them greedy, half drawn with our noise."""
    weights, alpha, terms = SUMS[kind]
    requests, read_by = [], []
    for i in range(50):
        prompt = [(5 * i + 3 * j + i * j) % VOCAB for j in range(2 + i)]
        other = prompt[i // 2 :] if kind == "context_aware" else [(7 * i + 2 * j) % VOCAB for j in range(1 + i % 30)]
        read = [replace(term, prompt=tuple(other)) if term.is_own else term for term in terms]
        models = [("first", prompt), *(("first", other) if term.is_own else (term.name, prompt) for term in read)]
        setting = replace(params(i), max_tokens=40)
        read_by.append(models)
        options = EnsembleOptions(blend=BlendParams(kind="formula", weights=weights, alpha=alpha))
        requests.append(Request(plain(drafter), prompt, setting, ensemble=options, terms=read))
    with running() as engine:
        answers = engine.generate(requests)
    for request, models, answer in zip(requests, read_by, answers, strict=True):
        assert tokens(answer) == choices(models, weighted(weights, alpha), request.params, tokens(answer))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_fifty_texts_with_layers(early: Engine, drafter: str | None) -> None:
    options = EnsembleOptions(blend=BlendParams(kind="formula", weights=(1, -1), alpha=0.1))
    terms = [Term(name="layers", is_own=True, layers=LAYERS)]
    settings = [replace(params(i), max_tokens=40) for i in range(50)]
    prompts = [[(5 * i + 3 * j + i * j) % VOCAB for j in range(2 + i % 20)] for i in range(50)]
    pairs = [*zip(prompts, settings, strict=True)]
    answers = early.generate([Request(plain(drafter), p, each, ensemble=options, terms=terms) for p, each in pairs])
    for (prompt, setting), answer in zip(pairs, answers, strict=True):
        assert tokens(answer) == dola(prompt, LAYERS, setting, tokens(answer))


def test_layers_that_are_not_kept_are_refused(early: Engine) -> None:
    options = EnsembleOptions(blend=BlendParams(kind="formula", weights=(1, -1)))
    request = Request(plain(), [1, 2], params(0), ensemble=options, terms=[Term(name="3", is_own=True, layers=(3,))])
    with pytest.raises(InvalidRequestError, match=r"reads layers \[3\], but the target keeps 0, 1, 2"):
        list(early.stream(request))


def test_a_sum_that_lost_a_term_is_the_target_alone() -> None:
    options = EnsembleOptions(blend=BlendParams(kind="formula", weights=(1, 1, -1)), on_member_failure="drop")
    terms = Term(name="second"), Term(name="negative", is_own=True, prompt=(1, 2, 3))
    long = SamplingParams(max_tokens=40, temperature=0)
    with running(runner=SlowRunner) as engine:
        stream = engine.stream(Request(plain(), PROMPTS[3], long, ensemble=options, terms=terms))
        first = [next(stream) for _ in range(5)]
        engine.lose("second")
        rest = list(stream)
    shares = rest[-1].members
    assert shares is not None
    assert [share.weight for share in shares] == [1, 0, 0]
    text = [*PROMPTS[3], *tokens(first), *tokens(rest)]
    with torch.no_grad():
        alone = MODELS["first"](torch.tensor([text])).logits[0].argmax(-1)
    gone = len(PROMPTS[3]) + shares[1].tokens
    assert gone < len(text)
    assert text[gone:] == alone[gone - 1 : -1].tolist()


def test_a_beam_search_has_no_formula() -> None:
    with pytest.raises(InvalidRequestError, match="absent from ensembles and formulas"):
        Request(plain(), [1], params(0), beams=BeamOptions(num_beams=2), **guidance(2, [1]))


def test_a_formula_without_room_is_refused() -> None:
    with running(slots=1) as engine, pytest.raises(InvalidRequestError, match=r"2 prompts at once.* 1 slots") as caught:
        list(engine.stream(Request(plain(), PROMPTS[1], params(0), **guidance(1.5, NEGATIVE[1]))))
    assert caught.value.field == "formula"
    with running() as engine, pytest.raises(InvalidRequestError, match="has 120 tokens, but should have 1 to 112"):
        list(engine.stream(Request(plain(), PROMPTS[1], params(0), **guidance(1.5, [1] * 120))))


def test_a_request_that_is_cancelled_during_its_step_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are read while the device computes, and the row is removed before its step is committed."""
    cancelled, receive = list[RowKey](), TargetInbox.receive

    def cancel(inbox: TargetInbox, timeout_s: float) -> None:
        receive(inbox, timeout_s)
        rows = [row for row in inbox._rows.writers if row.ensemble and row.ensemble.is_complete and row.generated]
        for row in rows if not cancelled else ():
            cancelled.append(row.key)
            inbox._rows.remove(row.key)

    monkeypatch.setattr(TargetInbox, "receive", cancel)
    with running() as engine:
        requests = [Request(plain(), p, params(i), **guidance(1.5, NEGATIVE[i])) for i, p in enumerate(PROMPTS[:2])]
        answers = engine.generate(requests)  # the row that was removed begins anew
    assert cancelled
    cases = zip(PROMPTS, NEGATIVE, range(2), strict=False)
    expected = [reference([("first", p), ("first", n)], guided(1.5), params(i)) for p, n, i in cases]
    assert [tokens(answer) for answer in answers] == expected
