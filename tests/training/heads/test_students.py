"""Heads as students: where their drafts start, that they learn, and that a killed training goes on to the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.distillation.chats import make_chats
from tests.training.heads.students import MadeUp, eagle3_student, lessons, medusa_student
from training.distillation.lessons import Student
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import held_out_rates
from training.texts import Chat

OPTIONS = DistillationOptions(epochs=4, learning_rate=2e-2, device="cpu", bfloat16=False, save_every_s=0.0)
RATES = {eagle3_student: 2e-2, medusa_student: 0.4}
KINDS = pytest.mark.parametrize("new", [eagle3_student, medusa_student])


class KilledError(Exception):
    """A test ends the run here."""


def train(
    student: Student, folder: Path, *, killed_after: int | None = None, epochs: int = 4, rate: float = 2e-2
) -> dict[str, torch.Tensor]:
    reports = 0

    def report(line: str) -> None:
        nonlocal reports
        reports += 1
        if reports == killed_after:
            raise KilledError

    options = replace(OPTIONS, report_every_s=0.0, epochs=epochs, learning_rate=rate)
    distil(student, lessons(), options, folder, report=report)
    return student.module.state_dict()


def shortened(chat: Chat, length: int) -> Chat:
    return replace(
        chat,
        tokens=chat.tokens[:length],
        candidates=chat.candidates[:length],
        logprobs=chat.logprobs[:length],
    )


@KINDS
def test_drafts_start_after_an_answers_first_token_and_end_with_it(new: Callable[[], Student]) -> None:
    student = new()
    batch = lessons().batch([0, 1])
    lengths = batch.counted.sum(-1).tolist()
    for step, (starts, logits) in enumerate(student.drafts(student.module, batch, 3)):
        first, second = (list(range(1, length - step)) for length in lengths)
        assert starts.tolist() == [*first, *(lengths[0] + start for start in second)]
        assert logits.shape == (len(starts), student.vocabulary.drafted)


@KINDS
@pytest.mark.parametrize("length", [1, 2, 3])
def test_answers_may_be_shorter_than_drafts(new: Callable[[], Student], length: int, tmp_path: Path) -> None:
    """Drafts of three tokens start after an answer's first token, so none starts in an answer of one."""
    student = new()
    before = {name: weight.clone() for name, weight in student.module.state_dict().items()}
    chats = [shortened(chat, length) for chat in make_chats(24)]
    distil(student, lessons(chats), OPTIONS, tmp_path, report=print)
    after = student.module.state_dict()
    assert all(weight.isfinite().all() for weight in after.values())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items()) == (length == 1)
    features = [MadeUp(chat) for chat in chats]
    assert not held_out_rates(student, chats, tokens=64, longest=64, features=features)


@KINDS
def test_a_killed_training_goes_on_to_the_same_bits(new: Callable[[], Student], tmp_path: Path) -> None:
    whole = train(new(), tmp_path / "whole")
    for killed_after in (2, 5):
        with pytest.raises(KilledError):
            train(new(), tmp_path / "parts", killed_after=killed_after)
    parts = train(new(), tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


@KINDS
def test_heads_learn_what_their_target_writes(new: Callable[[], Student], tmp_path: Path) -> None:
    chats = make_chats(30)[24:]
    features = [MadeUp(chat) for chat in chats]
    before = held_out_rates(new(), chats, tokens=64, longest=64, features=features)
    student = new()
    train(student, tmp_path, epochs=60, rate=RATES[new])
    after = held_out_rates(student, chats, tokens=64, longest=64, features=features)
    for early, late in zip(before, after, strict=True):
        assert late.agreement > early.agreement + 0.3
        assert late.shared_noise[1] > early.shared_noise[1] + 0.1
        assert late.shared_noise == sorted(late.shared_noise, reverse=True)


def test_heads_without_a_token_can_not_draft_it() -> None:
    student = eagle3_student()
    known, rows = student.vocabulary.find(torch.tensor([0, 1, 39]))
    assert known.tolist() == [False, True, True]
    assert rows.tolist() == [0, 0, 38]
    assert student.vocabulary.read(torch.tensor([0, 39])).tolist() == [0, 39]
