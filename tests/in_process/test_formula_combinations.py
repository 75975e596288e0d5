"""Formulas beside what else a request may have: its text is that of plain forwards of both prompts."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.coordinator.request import Delta, Endpoint, Request, Term
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.drafts.options import CorpusOptions, NgramOptions
from decoding.errors import InvalidRequestError
from decoding.grammars.grammar import Grammar
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.params import SamplingParams, Structure
from engine.loading.tokenizers import structure_tokenizer
from engine.model.runner import Runner
from tests.in_process import test_adapters as adapters
from tests.in_process import test_structured as structured
from tests.in_process.test_ensemble import MODELS, PROMPTS, SlowRunner, params, running, tokens
from tests.in_process.test_formulas import NEGATIVE, guidance
from tests.in_process.test_parameters import TARGET
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model
from tests.support.structures import unpacked

SCALE = 1.5
Shape = Callable[[list[int], Tensor], Tensor]  # what other parameters make of the sum, after an answer
PLAIN = Endpoint("p", "first", None, 4, decode=lambda ids: "".join(chr(64 + token) for token in ids))


def guided(prompt: Sequence[int], setting: SamplingParams, negative: Sequence[int], **more: Any) -> Request:
    endpoint = more.pop("endpoint", PLAIN)
    return Request(endpoint, prompt, setting, **guidance(SCALE, negative), **more)


def sums(model: Any, prompts: Sequence[Sequence[int]], answer: Sequence[int]) -> Tensor:
    """Return the weighted sum after an answer, [V]. prompts: the own one and the negative one."""
    own, other = (model(torch.tensor([[*prompt, *answer]])).logits[0, -1].log_softmax(-1) for prompt in prompts)
    return SCALE * (own - other) + other


@torch.no_grad()
def expected(model: Any, prompts: Sequence[Sequence[int]], setting: SamplingParams, shape: Shape) -> list[int]:
    answer: list[int] = []
    while len(answer) < setting.max_tokens and not set(answer) & set(setting.eos_token_ids):
        scores = shape(answer, sums(model, prompts, answer))
        if setting.temperature:
            key = torch.tensor([noise_key(setting.seed, len(prompts[0]) + len(answer))], dtype=torch.int32)
            scores = scores / setting.temperature + gumbel(key, len(scores))[0]
        answer.append(int(scores.argmax()))
    return answer


def alone(i: int, setting: SamplingParams, shape: Shape = lambda _, scores: scores) -> list[int]:
    return expected(MODELS["first"], (PROMPTS[i], NEGATIVE[i]), setting, shape)


def by(answers: Sequence[list[Delta]]) -> set[str]:
    """Return which proposers' drafts were accepted."""
    return {str(name) for answer in answers for name in answer[-1].statistics.accepted_by}


@contextmanager
def target(*, slots: int = 8, pages: int | None = None, **options: Any) -> Iterator[Engine]:
    runner = SlowRunner(MODELS["first"], slots=slots, max_length=128, max_query=64, pages=pages)
    with Engine({"first": ("target", runner)}, LoopOptions(prefill_chunk=8, adaptive=False, **options)) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["", "ngram", "drafter"])
def test_adapters(tmp_path: Path, drafts: str) -> None:
    """Both prompts are read with the request's adapter, beside rows with none."""
    TARGET.save_pretrained(tmp_path / "target")
    adapted = save_adapter(tmp_path / "a", tiny_model("llama-gqa"), 1)
    models = [adapted, TARGET] * 3
    settings = [replace(params(i // 2), max_tokens=24) for i in range(6)]
    ends = [adapters.endpoint(tmp_path, name, drafts) for name in ("a", None)] * 3
    requests = [guided(PROMPTS[i], settings[i], NEGATIVE[i], endpoint=end) for i, end in enumerate(ends)]
    with adapters.running(tmp_path, drafts=drafts, adapters={"a": str(tmp_path / "a")}) as engine:
        answers = engine.generate(requests)
    for i, answer in enumerate(answers):
        assert tokens(answer) == expected(models[i], (PROMPTS[i], NEGATIVE[i]), settings[i], lambda _, scores: scores)
    assert by(answers) == ({drafts} if drafts else set())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corpus", "prediction", "ngram"])
def test_copied_drafts(kind: str) -> None:
    """What an earlier, or the expected, answer has is copied; the prompt of n-grams has the answer itself."""
    setting = replace(params(1), max_tokens=24)
    texts = [alone(i, replace(setting, temperature=0)) for i in range(4)]
    endpoint = replace(PLAIN, corpus=kind == "corpus", ngram=NgramOptions() if kind == "ngram" else None)
    settings = [replace(params(2 * i), max_tokens=24) for i in range(4)]
    own = [[*PROMPTS[i], *texts[i], *PROMPTS[i]] if kind == "ngram" else PROMPTS[i] for i in range(4)]
    more = [{"prediction": text} if kind == "prediction" else {} for text in texts]
    wanted = [expected(MODELS["first"], (own[i], NEGATIVE[i]), settings[i], lambda _, scores: scores) for i in range(4)]
    with target(corpus=CorpusOptions(10_000) if kind == "corpus" else None) as engine:
        for _ in range(2):
            answers = engine.generate(
                [guided(own[i], settings[i], NEGATIVE[i], endpoint=endpoint, **more[i]) for i in range(4)]
            )
            assert [tokens(answer) for answer in answers] == wanted
    assert by(answers) == {kind}


def test_log_probabilities_are_those_of_the_sum() -> None:
    """Those of the prompt are the target's own."""
    setting = replace(params(1), logprobs=3, prompt_logprobs=2)
    with target() as engine:
        answer = list(engine.stream(guided(PROMPTS[2], setting, NEGATIVE[2])))
    text = tokens(answer)
    assert text == alone(2, setting)
    with torch.no_grad():
        wanted = torch.stack([sums(MODELS["first"], (PROMPTS[2], NEGATIVE[2]), text[:end]) for end in range(len(text))])
        prompt = MODELS["first"](torch.tensor([PROMPTS[2]])).logits[0, :-1].log_softmax(-1)
    logprobs = [token.logprobs for delta in answer for token in delta.tokens]
    best = wanted.log_softmax(-1).topk(3)
    assert [[token for token, _ in each.top] for each in logprobs if each] == best.indices.tolist()
    for each, values, own in zip(logprobs, best.values.tolist(), wanted.log_softmax(-1), strict=True):
        assert each is not None
        assert [value for _, value in each.top] == pytest.approx(values, abs=1e-4)
        assert each.logprob == pytest.approx(float(own[each.token]), abs=1e-4)
    known = [each for delta in answer for each in delta.prompt_logprobs or ()]
    of_prompt = [float(line[token]) for line, token in zip(prompt, PROMPTS[2][1:], strict=True)]
    assert [each.logprob for each in known] == pytest.approx(of_prompt, abs=1e-4)


def test_penalties_act_on_the_sum_as_in_transformers() -> None:
    model: Any = MODELS["first"]
    setting = SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.4, no_repeat_ngram_size=3)
    with target() as engine:
        answers = engine.generate([guided(PROMPTS[i], setting, NEGATIVE[i]) for i in range(4)])
    for i, answer in enumerate(answers):
        options = {"guidance_scale": SCALE, "negative_prompt_ids": torch.tensor([NEGATIVE[i]]), "do_sample": False}
        with torch.no_grad():
            ids = torch.tensor([PROMPTS[i]])
            options |= {
                "repetition_penalty": 1.4,
                "no_repeat_ngram_size": 3,
                "max_new_tokens": 24,
                "eos_token_id": None,
            }
            assert tokens(answer) == model.generate(ids, **options)[0, len(PROMPTS[i]) :].tolist()


@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_stop_strings_end_the_text(drafter: str | None) -> None:
    settings = [replace(params(i), max_tokens=24) for i in range(4)]
    texts = [PLAIN.decode(alone(i, setting)) for i, setting in enumerate(settings)]
    stops = [text[7:9] for text in texts]
    with running(runner=SlowRunner if drafter else Runner) as engine:
        requests = [
            guided(PROMPTS[i], replace(each, stop=(stop,)), NEGATIVE[i], endpoint=replace(PLAIN, drafter=drafter))
            for i, (each, stop) in enumerate(zip(settings, stops, strict=True))
        ]
        answers = engine.generate(requests)
    for text, stop, answer in zip(texts, stops, answers, strict=True):
        assert "".join(delta.text for delta in answer) == text[: text.index(stop)]
        assert (answer[-1].finish, answer[-1].stop_reason) == ("stop", stop)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_grammars_mask_the_sum(drafts: bool) -> None:
    model = structured.load("target")
    kinds: list[Any] = [("regex", structured.FUNCTION), ("json", json.dumps(structured.PERSON))]
    prompts, negative = structured.prompts(4), structured.TOKENIZER("# An empty file").input_ids
    settings = [
        SamplingParams(
            max_tokens=40,
            temperature=0.9 * (i % 2),
            seed=i,
            eos_token_ids=(structured.EOS,),
            structure=Structure(kind=kinds[i // 2][0], definition=kinds[i // 2][1]),
        )
        for i in range(4)
    ]

    def masked(structure: Structure) -> Shape:
        grammar = Grammar(structure, structure_tokenizer(structured.TOKENIZER))

        def mask(answer: list[int], scores: Tensor) -> Tensor:
            matcher = grammar.matcher()
            assert matcher.consume_tokens(answer)
            allowed = unpacked(torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32))
            return scores.masked_fill(~allowed[: len(scores)], -torch.inf)

        return mask

    endpoint = Endpoint("test", "target", "drafter" if drafts else None, 4, decode=str)
    with structured.running(model, structured.load("drafter")) as engine:
        requests = [
            guided(prompt, each, negative, endpoint=endpoint) for prompt, each in zip(prompts, settings, strict=True)
        ]
        answers = engine.generate(requests)
    for prompt, setting, answer in zip(prompts, settings, answers, strict=True):
        assert setting.structure is not None
        assert tokens(answer) == expected(model, (prompt, negative), setting, masked(setting.structure))


def test_answers_that_the_pages_can_t_hold_are_refused_at_once() -> None:
    """The equal first pages of prompts count once, and what fits is written to its end."""
    shared = [*range(1, 33)]
    long, negative = [*shared, *range(1, 17)], [*shared, *range(20, 40)]
    with target(pages=8) as engine:
        fits = SamplingParams(max_tokens=29, temperature=0)
        assert len(tokens(list(engine.stream(guided(long, fits, negative))))) == 29
        with pytest.raises(InvalidRequestError, match="lower max_tokens to 29 or less") as caught:
            list(engine.stream(guided(long, replace(fits, max_tokens=30), negative)))
        assert caught.value.field == "max_tokens"
        request = guided([*range(64), *shared], SamplingParams(max_tokens=2, temperature=0), [*reversed(range(64))])
        with pytest.raises(InvalidRequestError, match=r"formula: 2 texts at once .* prompts alone don't fit") as caught:
            list(engine.stream(request))
        assert caught.value.field == "formula"


def test_a_sum_of_positive_terms_goes_on_without_one_that_is_lost() -> None:
    """The other weights keep their sum."""
    options = EnsembleOptions(blend=BlendParams(kind="formula", weights=(1, 0.7, 0.3)), on_member_failure="drop")
    terms = Term(name="second"), Term(name="other", is_own=True, prompt=tuple(NEGATIVE[3]))
    long = SamplingParams(max_tokens=40, temperature=0)
    with running(runner=SlowRunner) as engine:
        stream = engine.stream(Request(PLAIN, PROMPTS[3], long, ensemble=options, terms=terms))
        first = [next(stream) for _ in range(3)]
        engine.lose("second")
        answer = [*first, *stream]
    shares, text = answer[-1].members, tokens(answer)
    assert shares is not None
    assert [share.weight for share in shares] == pytest.approx([2 / 1.3, 0, 0.6 / 1.3])
    assert shares[1].tokens < len(text) == 40
    for end in range(shares[1].tokens, 40):
        with torch.no_grad():
            texts = [[*prompt, *text[:end]] for prompt in (PROMPTS[3], NEGATIVE[3])]
            own, other = (MODELS["first"](torch.tensor([each])).logits[0, -1].log_softmax(-1) for each in texts)
        assert text[end] == int((own + 0.3 * other).argmax())
