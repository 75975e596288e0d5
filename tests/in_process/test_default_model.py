"""The model of the default configuration writes what `generate` writes, and its endpoint answers in English."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from decoding.drafts.options import NgramOptions
from decoding.sampling.params import SamplingParams
from deployments.apis.chat.request import ChatRequest
from deployments.configuration.config import load_config
from deployments.endpoints.loading import load_endpoints
from engine.kernels.native import library
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.runners import load_runner
from engine.loading.settings import load_tokenizer
from engine.model.ragged_batch import RowInput
from tests.support import reference

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)
QUESTIONS = [
    "What is the capital of France?",
    "Give me three tips to sleep better.",
    "Repeat this sentence: the cat sat on the mat, and the cat sat on the hat.",
]
TOPICS = [
    "bread",
    "the moon",
    "a violin",
    "rivers",
    "the number seven",
    "bees",
    "old maps",
    "snow",
    "a library",
    "salt",
]
TASKS = [
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "List three facts about {}.",
    "Write a short poem about {}.",
    "What is the history of {}?",
    "Why do people like {}?",
    "Write a question about {} and answer it.",
    "Name three things that go well with {}.",
    "Tell a joke about {}.",
    "Write a letter to a friend about {}.",
]
EVERY = [task.format(topic) for topic in TOPICS for task in TASKS]


class DefaultModel:
    """The default model in float32, once for transformers and once for the engine."""

    def __init__(self) -> None:
        options = load_config().models["smollm2"].spec("smollm2")
        self.spec = ModelSpec(name="smollm2", path=options.path, dtype="float32", device="cpu", max_length=256)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.spec.path)
        self.alone: PreTrainedModel = load_model(self.spec).eval()
        self.engine = Engine({"smollm2": ("target", load_runner(self.spec))}, LoopOptions(adaptive=False))

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(str(text), add_special_tokens=False))

    def answer(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Delta]]:
        endpoint = Endpoint("smollm2", "smollm2", None, 4, lambda tokens: "", ngram=NgramOptions())
        requests = [Request(endpoint, prompt, setting) for prompt, setting in zip(prompts, params, strict=True)]
        return self.engine.generate(requests)

    def check(self, questions: Sequence[str], *, max_tokens: int) -> int:
        """Check greedy texts against `generate`. Returns how many draft tokens were accepted."""
        prompts = [self.prompt(question) for question in questions]
        params = [SamplingParams(max_tokens=max_tokens, temperature=0, eos_token_ids=(2,))] * len(prompts)
        answers = self.answer(prompts, params)
        outputs = [[token for delta in answer for token in delta.token_ids] for answer in answers]
        expected = reference.generate(self.alone, prompts, params)
        reference.assert_same(self.alone, prompts, params, outputs, expected)
        return sum(answer[-1].statistics.accepted for answer in answers)


@pytest.fixture(scope="module")
def model() -> Iterator[DefaultModel]:
    model = DefaultModel()
    with model.engine:
        yield model
        model.engine.check()


@torch.no_grad()
def test_greedy_texts_are_those_of_generate(model: DefaultModel) -> None:
    assert model.check(QUESTIONS, max_tokens=20) > 0


@pytest.mark.parametrize("path", [None, "models/smollm2-drafter"])
def test_texts_are_split_as_the_original_tokenizer_splits_them(model: DefaultModel, path: str | None) -> None:
    """The original, of HuggingFaceTB/SmolLM2-135M-Instruct, splits off every digit first."""
    tokenizer = model.tokenizer if path is None else load_tokenizer(str(ROOT / path))
    pieces = ["Steps", ":", "ĊĊ", "1", ".", "ĠMix", "Ġ", "2", "0", "Ġeggs"]
    assert tokenizer.tokenize("Steps:\n\n1. Mix 20 eggs") == pieces


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@torch.inference_mode()
def test_logits_have_the_same_bits_however_a_text_is_read(model: DefaultModel) -> None:
    """In bfloat16, as it is served. Products of this size are where libraries choose kernels by the batch."""
    runner = load_runner(replace(model.spec, dtype="bfloat16"))
    text = [token for question in QUESTIONS for token in model.prompt(question)][-70:]

    def logits(size: int) -> torch.Tensor:
        """Read so many tokens at once. Return the last logits, [1, V]."""
        runner.cache.clear_all()
        for start in range(0, len(text), size):
            result = runner.logits([RowInput(0, start, text[start : start + size])])
        return result[-1:].clone()

    expected = logits(len(text))
    for size in (1, 5, 8, 16, 17, 24, 33):
        assert torch.equal(logits(size), expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_hundred_greedy_texts_are_those_of_generate(model: DefaultModel) -> None:
    assert len(set(EVERY)) == 100
    assert model.check(EVERY, max_tokens=48) > 0


def test_the_default_endpoint_answers_in_english(model: DefaultModel) -> None:
    served = load_endpoints(load_config())["smollm2"]
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    body = ChatRequest.model_validate({"model": "smollm2", "messages": messages, "max_tokens": 24})
    (request,) = served.prepare(body, seed=1)
    assert list(request.prompt) == model.prompt(QUESTIONS[0])
    assert request.params.temperature == 0.6
    assert 2 in request.params.end_token_ids
    (answer,) = model.engine.generate([request])
    assert "Paris" in "".join(delta.text for delta in answer)
    assert answer[-1].finish == "stop"
