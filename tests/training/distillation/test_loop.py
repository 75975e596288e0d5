"""Distillation: it learns, and a run that was killed computes the same as one that was not."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from tests.training.distillation.chats import TOKENS, KilledError, killing, make_chats, make_model
from training.distillation.lessons import Batch, Lessons, StudentVocabulary
from training.distillation.loop import DistillationOptions, batch_result, distil
from training.distillation.rates import LOSSES, LossName, held_out_rates
from training.drafter import DrafterStudent

VOCABULARY = StudentVocabulary(torch.arange(TOKENS), TOKENS)
OPTIONS = DistillationOptions(epochs=6, learning_rate=5e-3, device="cpu", bfloat16=False, save_every_s=0.0)


def train(folder: Path, *, killed_after: int | None = None, options: DistillationOptions = OPTIONS) -> PreTrainedModel:
    lessons = Lessons(make_chats(24), VOCABULARY, tokens=64, longest=64, seed=1)
    options = replace(options, report_every_s=0.0)
    model = make_model()
    distil(DrafterStudent(model, VOCABULARY), lessons, options, folder, report=killing(killed_after))
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights after a run that nothing stopped."""
    return train(tmp_path_factory.mktemp("whole")).state_dict()


def test_a_killed_run_goes_on_to_the_same_bits(whole: dict[str, Tensor], tmp_path: Path) -> None:
    for killed_after in (1, 5, 2):
        with pytest.raises(KilledError):
            train(tmp_path / "parts", killed_after=killed_after)
    parts = train(tmp_path / "parts")
    for name, weight in whole.items():
        assert torch.equal(weight, parts.state_dict()[name]), name


def test_a_checkpoint_that_was_being_written_is_not_taken(whole: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(tmp_path / "parts", killed_after=4)
    (newest,) = (tmp_path / "parts").glob("step-*")
    shutil.copytree(newest, tmp_path / "parts" / ".step-9.unfinished")
    (tmp_path / "parts" / ".step-9.unfinished" / "model.safetensors").write_bytes(b"half")
    parts = train(tmp_path / "parts")
    assert all(torch.equal(weight, parts.state_dict()[name]) for name, weight in whole.items())


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    first, again = train(tmp_path), train(tmp_path, options=replace(OPTIONS, learning_rate=1.0))
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in first.state_dict().items())


def test_the_minutes_end_a_run(tmp_path: Path) -> None:
    train(tmp_path, options=replace(OPTIONS, epochs=1_000, minutes=0.01))
    (newest,) = tmp_path.glob("step-*")
    assert 1 <= int(newest.name.removeprefix("step-")) < 1_000


@pytest.mark.parametrize("loss", ["lk", "kl"])
def test_the_student_learns_what_its_teacher_writes(tmp_path: Path, loss: LossName) -> None:
    chats = make_chats(30)
    before = held_out_rates(DrafterStudent(make_model(), VOCABULARY), chats[24:], tokens=64, longest=64)
    trained = train(tmp_path, options=replace(OPTIONS, loss=loss, epochs=30, save_every_s=60.0))
    after = held_out_rates(DrafterStudent(trained, VOCABULARY), chats[24:], tokens=64, longest=64)
    assert [rates.temperature for rates in after] == [0.0, 0.7, 1.0]
    for early, late in zip(before, after, strict=True):
        assert late.agreement > early.agreement + 0.3
        assert late.rejection[0] > early.rejection[0] + 0.3


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict, LOSSES), "lk", lambda log_q, p: log_q.sum() * float("nan"))
    with pytest.raises(ConfigError, match="loss is nan after 0 steps"):
        train(tmp_path)


class TrimmedStudent(DrafterStudent):
    """A student that lacks one of three candidates, and gives its probability to a token beyond them."""

    def __init__(self) -> None:
        super().__init__(make_model(), VOCABULARY)
        self.logits = torch.tensor([[0.5, 0.2, 0.3]]).log().requires_grad_()

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.tensor([0]), self.logits


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("reverse_kl", 0.0),
        ("tv", 0.3),
        ("kl", -0.7 * math.log(0.7)),
        ("lk", -0.7 * math.log(0.7) * math.exp(-2.1) + 0.3 * (1 - math.exp(-2.1))),
    ],
)
def test_tokens_that_the_student_lacks_count_as_others(loss: LossName, expected: float) -> None:
    student = TrimmedStudent()
    batch = Batch(
        tokens=torch.tensor([[0]]),
        counted=torch.tensor([[True]]),
        candidates=torch.tensor([[0, 0, 1]]),
        known=torch.tensor([[True, False, True]]),
        logprobs=torch.tensor([[0.5, 0.3, 0.2]]).log(),
        is_drawn=torch.tensor([[True, False, False]]),
    )
    result = batch_result(student, student.module, batch, replace(OPTIONS, loss=loss), 1.0)
    assert result is not None
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert result.acceptance.item() == pytest.approx(0.7)
    (gradient,) = torch.autograd.grad(result.loss, student.logits)
    assert gradient.isfinite().all()


def test_no_texts_are_refused(tmp_path: Path) -> None:
    lessons = Lessons([], VOCABULARY, tokens=64, longest=64, seed=1)
    with pytest.raises(ConfigError, match="no texts"):
        distil(DrafterStudent(make_model(), VOCABULARY), lessons, OPTIONS, tmp_path, report=lambda line: None)
