"""What a drafter learns from committed texts, and when it publishes."""

import random
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.loops.adaptation import Begin, Checked, CommittedText, FromLearner, LearnerProcess, Texts, Work
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from tests.support.models import VOCAB, tiny_model
from tests.support.trimmed import copied, save_trimmed
from tests.support.waiting import wait_until
from training.adaptation import AdaptingDrafter, RecentTexts, TextBatch
from training.distillation.lessons import StudentVocabulary

ALL = StudentVocabulary(torch.arange(VOCAB), VOCAB)


def counting(number: int, *, temperature: float = 0.0, step: int = 3) -> CommittedText:
    """Return a text that is easy to learn: each token is the one before it plus a constant."""
    first = random.Random(number).randrange(VOCAB)
    tokens = [(first + step * index) % VOCAB for index in range(24)]
    return CommittedText(tokens, 4, SamplingParams(max_tokens=20, temperature=temperature, seed=number))


def noise(number: int) -> CommittedText:
    rng = random.Random(number)
    return CommittedText([rng.randrange(VOCAB) for _ in range(24)], 4, SamplingParams(max_tokens=20, temperature=0))


class Saved:
    def __init__(self) -> None:
        self.models: list[PreTrainedModel] = []

    def __call__(self, model: PreTrainedModel) -> str:
        self.models.append(deepcopy(model))
        return f"folder {len(self.models)}"


def adapting(saved: Saved, vocabulary: StudentVocabulary = ALL, *, rate: float = 1e-2) -> AdaptingDrafter:
    model = copied(tiny_model("llama-gqa"))
    return AdaptingDrafter(model, vocabulary, texts=64, update_after=32, learning_rate=rate, save=saved)


def run_round(drafter: AdaptingDrafter, texts: Sequence[CommittedText]) -> Checked:
    drafter.add(texts)
    assert drafter.due
    while True:
        result = drafter.step()
        if result is not None:
            return result


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_what_repeats_is_learned_and_published(temperature: float) -> None:
    saved = Saved()
    drafter = adapting(saved)
    results = [
        run_round(drafter, [counting(32 * turn + index, temperature=temperature) for index in range(32)])
        for turn in range(12)
    ]
    last = results[-1]
    assert saved.models
    assert [result.folder for result in results if result.folder is not None][-1] == f"folder {len(saved.models)}"
    assert last.acceptance_after > last.acceptance_before + 0.3
    assert last.texts == 16
    assert not drafter.due


def test_what_can_not_be_learned_publishes_nothing() -> None:
    saved = Saved()
    drafter = adapting(saved, rate=1e-3)
    results = [run_round(drafter, [noise(32 * turn + index) for index in range(32)]) for turn in range(6)]
    assert saved.models == []
    assert all(result.acceptance_after == result.acceptance_before for result in results)


def test_acceptance_is_that_of_the_requests_own_noise() -> None:
    """A text that the drafter itself wrote with the shared noise is drafted as it is."""
    model = copied(tiny_model("llama-gqa"))
    params = SamplingParams(max_tokens=20, temperature=0.9, top_k=20, seed=5)
    tokens = [3, 1, 4, 1]
    for _ in range(20):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1:].detach()
        history = History(params, tokens, 4)
        tokens = [*tokens, int(sample(logits, SamplingBatch.build([Position(history, [], None)], VOCAB)))]
    drafter = adapting(Saved())
    batch = TextBatch.gather([CommittedText(tokens, 4, params)], ALL)
    assert drafter._drafted(model, batch).tolist() == [True] * 20
    other = TextBatch.gather(
        [CommittedText(tokens, 4, SamplingParams(max_tokens=20, temperature=0.9, top_k=20, seed=6))], ALL
    )
    assert not all(drafter._drafted(model, other).tolist())


def test_tokens_that_a_trimmed_drafter_lacks_count_as_not_drafted(tmp_path: Path) -> None:
    kept = [token for token in range(VOCAB) if token % 4]
    save_trimmed(copied(tiny_model("llama-gqa")), kept, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    vocabulary = StudentVocabulary.of_model(model, str(tmp_path))
    assert vocabulary.tokens.tolist() == kept
    saved = Saved()
    drafter = AdaptingDrafter(model, vocabulary, texts=64, update_after=32, learning_rate=1e-2, save=saved)
    results = [run_round(drafter, [counting(32 * turn + index) for index in range(32)]) for turn in range(12)]
    assert saved.models
    assert results[-1].acceptance_before < results[-1].acceptance_after <= 0.8  # three quarters of the tokens


def test_every_fourth_text_is_held_out_and_old_ones_go() -> None:
    texts = RecentTexts(8)
    every = [counting(number, step=1) for number in range(20)]
    texts.add(every)
    assert texts.new == 20
    training, held_out = texts.start_round()
    assert texts.new == 0
    assert [text.params.seed for batch in held_out for text in batch] == [12, 16]
    assert [text.params.seed for batch in training for text in batch] == [13, 14, 15, 17, 18, 19]


def test_long_texts_lose_their_beginning_and_keep_their_positions() -> None:
    text = CommittedText([1] * 2000 + [2, 3, 4], 2000, SamplingParams(max_tokens=20, temperature=0))
    batch = TextBatch.gather([text], ALL)
    assert batch.tokens.shape == (1, 1023)
    assert batch.answers.tolist() == [2, 3, 4]
    assert batch.counted.sum() == 3
    assert batch.requests == [(text.params, 2000, 3)]


def begin(folder: Path) -> Begin:
    return Begin(
        path=str(folder),
        revision=None,
        trust_remote_code=False,
        safetensors_only=True,
        adapter=None,
        texts=64,
        update_after=32,
        learning_rate=1e-2,
    )


@pytest.mark.slow
def test_a_process_learns_and_writes_a_checkpoint(tmp_path: Path) -> None:
    tiny_model("llama-gqa").save_pretrained(tmp_path)
    learner = LearnerProcess("training.adaptation", begin(tmp_path))
    received: list[FromLearner] = []

    def published() -> bool:
        received.extend(learner.receive())
        return any(isinstance(message, Checked) and message.folder for message in received)

    try:
        for turn in range(12):
            learner.send(Texts([counting(32 * turn + index) for index in range(32)]))
            learner.send(Work())
        wait_until(published, "new weights", timeout_s=120.0)
        folder = next(message.folder for message in received if isinstance(message, Checked) and message.folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
    finally:
        learner.close()


@pytest.mark.slow
def test_a_process_ends_with_its_replica() -> None:
    process = subprocess.run([sys.executable, "-m", "training.adaptation"], stdin=subprocess.DEVNULL, timeout=120)
    assert process.returncode == 0
