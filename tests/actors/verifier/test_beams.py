"""Beams over KV slots are those of Hugging Face `generate(num_beams=…)`, alone and beside other rows."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from actors.loops.row_table import RowTable
from actors.verifier.beams import BeamRow
from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions, EarlyStopping
from decoding.beams.search import BeamSearch, beam_noise
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.beam_loop import Asked, PlainRow, beam_row, begin, search_all, step
from tests.support.models import VOCAB, tiny_model

TARGET = Path("models/target")
ENDS = (2, 204)  # the end of the text, and of a line: so that searches end in every way
TOKENS = 12
EARLY_STOPPING: list[EarlyStopping] = [True, False, "never"]
MODES = list(product(EARLY_STOPPING, [0.0, 1.0, 2.0, -0.7]))  # the other is length_penalty


class Reference:
    """The bundled target in float32, on KV slots and in transformers."""

    def __init__(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        lines = Path("models/heldout.jsonl").read_text(encoding="utf-8").splitlines()
        self.prompts: list[list[int]] = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
        self.model = load()
        self.runner = Runner(load(), slots=48, max_length=256, max_query=128)

    def generate(self, asked: Sequence[Asked], **more: Any) -> list[list[Hypothesis]]:
        """Return the answers of `generate` for requests that differ only in their prompts."""
        prompts = [prompt for prompt, _, _ in asked]
        _, params, options = asked[0]
        width = max(map(len, prompts))
        output = self.model.generate(  # type: ignore[operator]
            torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            num_beams=options.num_beams,
            num_return_sequences=options.num_return_sequences,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            do_sample=not params.greedy,
            max_new_tokens=params.max_tokens,
            eos_token_id=list(params.eos_token_ids) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **more,
        )
        lengths = (output.beam_indices >= 0).sum(-1).tolist()
        texts = [row[width : width + length].tolist() for row, length in zip(output.sequences, lengths, strict=True)]
        answers = iter(
            Hypothesis(text, score, 0.0, "stop" if text[-1] in params.eos_token_ids else "length")
            for text, score in zip(texts, output.sequences_scores.tolist(), strict=True)
        )
        return [list(islice(answers, options.num_return_sequences)) for _ in asked]


def load() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def assert_same(actual: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(answer.tokens, answer.finish) for answer in actual] == [
        (answer.tokens, answer.finish) for answer in expected
    ]
    assert [answer.score for answer in actual] == pytest.approx(
        [answer.score for answer in expected], abs=1e-4, rel=1e-5
    )


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, temperature=0, eos_token_ids=ENDS, **more)


def batches(reference: Reference) -> Iterator[list[Asked]]:
    """48 prompts, four for every mode."""
    for mode, (early_stopping, length_penalty) in enumerate(MODES):
        options = BeamOptions(
            num_beams=2 + mode % 4,
            num_return_sequences=2 + mode % 4,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
        yield [(prompt, greedy(), options) for prompt in reference.prompts[4 * mode : 4 * (mode + 1)]]


def test_beams_and_scores_are_those_of_generate(reference: Reference) -> None:
    """All modes at once in one batch, while requests come and go."""
    asked = list(batches(reference))
    answers_per_request = iter(search_all(reference.runner, [request for batch in asked for request in batch]))
    finishes = set()
    for batch in asked:
        for expected in reference.generate(batch):
            answers = next(answers_per_request)
            assert_same(answers, expected)
            finishes |= {answer.finish for answer in answers}
    assert finishes == {"stop", "length"}
    assert reference.runner.cache.free == 48


def test_processors_act_on_beams(reference: Reference) -> None:
    params = greedy(repetition_penalty=1.3, no_repeat_ngram_size=3, min_tokens=6, suppress_tokens=(13, 17))
    options = BeamOptions(num_beams=4, num_return_sequences=4)
    asked = [(prompt, params, options) for prompt in reference.prompts[:8]]
    expected = reference.generate(
        asked, repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=6, suppress_tokens=[13, 17]
    )
    for answers, wanted in zip(search_all(reference.runner, asked), expected, strict=True):
        assert_same(answers, wanted)


def test_beam_sampling_is_that_of_generate_with_our_noise(reference: Reference) -> None:
    """The reference is transformers, with its draws without replacement replaced by ours."""
    options = BeamOptions(num_beams=3, num_return_sequences=3)
    for seed, prompt in enumerate(reference.prompts[:5]):
        params = SamplingParams(max_tokens=TOKENS, temperature=0.8, top_k=50, seed=seed, eos_token_ids=ENDS)
        position = iter(range(len(prompt), 1000))

        def draw(probs: Tensor, num_samples: int, seed: int = seed, position: Iterator[int] = position) -> Tensor:
            noise = beam_noise(seed, next(position), 3, probs.shape[1] // 3).reshape(1, -1)
            return (probs.log() + noise).topk(num_samples).indices

        (answers,) = search_all(reference.runner, [(prompt, params, options)])
        with mock.patch("torch.multinomial", draw):
            (expected,) = reference.generate([(prompt, params, options)], temperature=0.8, top_k=50)
        assert_same(answers, expected)


def test_alone_beside_others_and_in_small_chunks(reference: Reference) -> None:
    """Searches of every kind give the same answers, and plain rows the same texts."""
    words = ((tuple(reference.prompts[50][3:5]), tuple(reference.prompts[51][4:5])),)
    kinds = [
        (greedy(), BeamOptions(num_beams=4, num_return_sequences=4)),
        (greedy(), BeamOptions(num_beams=6, num_return_sequences=2, force_words_ids=words)),
        (greedy(), BeamOptions(num_beams=6, num_return_sequences=6, num_beam_groups=3, diversity_penalty=0.7)),
        (
            SamplingParams(max_tokens=12, temperature=1.0, seed=5, eos_token_ids=ENDS),
            BeamOptions(num_beams=2, num_return_sequences=2),
        ),
        (greedy(repetition_penalty=1.2), BeamOptions(num_beams=1, early_stopping=True)),
    ]
    asked = [(reference.prompts[100 + i], *kinds[i % len(kinds)]) for i in range(15)]
    alone = [search_all(reference.runner, [request])[0] for request in asked]
    beside = [PlainRow(reference.runner, prompt) for prompt in reference.prompts[:3]]
    together = search_all(reference.runner, asked, beside=beside, chunk=16)
    for answers, expected in zip(together, alone, strict=True):
        assert_same(answers, expected)
    for plain, prompt in zip(beside, reference.prompts, strict=False):
        reference.runner.cache.give_back(plain.slot)
        assert plain.tokens[: len(prompt)] == prompt
        logits = reference.model(torch.tensor([plain.tokens])).logits[0, len(prompt) - 1 : -1]
        assert plain.tokens[len(prompt) :] == logits.argmax(-1).tolist()
    for answers in together[1::5]:
        assert all(any(phrase[0] in answer.tokens for phrase in words[0]) for answer in answers)


@torch.no_grad()
def plain_search(model: PreTrainedModel, asked: Asked) -> list[Hypothesis]:
    """Search without a cache: every step runs the whole text of every beam."""
    prompt, params, options = asked
    search = BeamSearch(options, max_tokens=params.max_tokens, end_token_ids=params.end_token_ids)
    while not search.done:
        texts = torch.tensor([[*prompt, *answer] for answer in search.live])
        search.advance(model(texts, use_cache=False).logits[:, -1].log_softmax(-1))
    return search.best()


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma3", "gpt2"])
def test_families(family: str) -> None:
    """Families with sliding windows over copied columns, and a prompt of one token."""
    runner = Runner(tiny_model(family), slots=12, max_length=80, max_query=24)
    params = SamplingParams(max_tokens=25, temperature=0, eos_token_ids=(3,))
    kinds = [
        BeamOptions(num_beams=4, num_return_sequences=4, early_stopping="never"),
        BeamOptions(num_beams=4, num_beam_groups=2, diversity_penalty=1.0),
        BeamOptions(num_beams=5, num_return_sequences=2, force_words_ids=(((7, 8, 9),), ((1,), (5, 6)))),
    ]
    prompts = [[(11 * i + j) % VOCAB for j in range(length)] for i, length in enumerate((1, 30, 17))]
    asked = [(prompt, params, options) for prompt, options in zip(prompts, kinds, strict=True)]
    for answers, request in zip(search_all(runner, asked, chunk=16), asked, strict=True):
        assert_same(answers, plain_search(runner.model, request))


def test_a_search_gives_back_all_pages_and_later_requests_take_over_its_prompt() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=5, max_length=80, max_query=24)
    prompt = [(5 * i) % VOCAB for i in range(40)]
    asked: Asked = (prompt, SamplingParams(max_tokens=25, temperature=0), BeamOptions(num_beams=4))
    rows: RowTable[BeamRow] = RowTable(runner.cache)
    row = beam_row(runner, 1, asked)
    rows.add(row)
    step(runner, row)
    for _ in range(6):
        step(runner, row)
    assert runner.cache.allocator.used <= 3 + 3  # the beams share the prompt's first pages
    rows.remove(row.key)
    assert (runner.cache.free, runner.cache.allocator.used) == (5, 0)
    again = beam_row(runner, 2, asked)
    rows.add(again)
    assert again.cached == 32


def test_an_interrupted_search_begins_anew() -> None:
    runner = Runner(tiny_model("llama-gqa"), slots=4, max_length=80, max_query=24)
    asked: Asked = ([1, 2, 3], SamplingParams(max_tokens=9, temperature=0), BeamOptions(num_beams=4))
    expected = search_all(runner, [asked])[0]
    row = beam_row(runner, 1, asked)
    begin(runner, row)
    step(runner, row)
    with (
        mock.patch.object(row.search, "advance", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        step(runner, row)
    row.undo()
    assert (row.cached, runner.cache.allocator.used) == (0, 0)
    step(runner, row)
    while not row.search.done:
        step(runner, row)
    assert row.search.best() == expected
