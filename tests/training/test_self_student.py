"""A target that learns to draft for itself: its blocks are what a server runs, and it learns them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import DraftStart, Reading
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from engine.model.ragged_batch import RowInput
from tests.engine.heads.test_self_drafting import expected
from tests.support.models import tiny_model
from tests.training.distillation.chats import KilledError, killing, make_chats, make_model
from training.distillation.lessons import Lessons
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import held_out_rates
from training.self_student import SelfStudent

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft

CHATS = make_chats(36)
TRAINED, HELD_OUT = CHATS[:30], CHATS[30:]
OPTIONS = DistillationOptions(epochs=4, learning_rate=0.1, device="cpu", bfloat16=False, save_every_s=0.0)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Return the weights of a target that writes such chats."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(400):
        chat = CHATS[step % len(CHATS)]
        tokens = torch.tensor([[*chat.prompt, *chat.tokens]])
        loss: Any = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def new_target(weights: dict[str, Tensor]) -> PreTrainedModel:
    model = make_model()
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def new_student(model: PreTrainedModel, **options: Any) -> SelfStudent:
    return SelfStudent(model, **{"rank": 8, "steps": 4, "longest": 64, "seed": 0} | options)


def train(student: SelfStudent, folder: Path, *, killed_after: int | None = None, **more: Any) -> dict[str, Tensor]:
    lessons = Lessons(TRAINED, student.vocabulary, tokens=64, longest=64, seed=1)
    options = DistillationOptions(**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__} | more)
    distil(student, lessons, options, folder, report=killing(killed_after))
    return student.module.state_dict()


@torch.no_grad()
def test_blocks_are_those_of_peft_after_each_text_alone(weights: dict[str, Tensor]) -> None:
    student = new_student(new_target(weights))
    for name, weight in student.adapted.named_parameters():
        if "lora_" in name:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    batch = Lessons(CHATS, student.vocabulary, tokens=64, longest=64, seed=1).batch([0, 1, 5])
    given: list[Any] = []
    handle = student.module.register_forward_pre_hook(lambda _, args: given.append(args))
    drafts = list(student.drafts(student.module, batch, 4))
    handle.remove()
    _, anchors, (rows, columns), _, noise = given[0]
    starts = drafts[0][0].tolist()
    for step, (of_step, logits) in enumerate(drafts):
        assert len(of_step)
        for start, drafted in zip(of_step.tolist(), logits, strict=True):
            row, column = (int(each[starts.index(start)]) for each in (rows, columns))
            text = batch.tokens[row, : anchors[row, column] + 1].tolist()
            block = noise[row].view(-1, 3)[column].tolist()
            torch.testing.assert_close(drafted, expected(student.adapted, text, block)[step], rtol=1e-4, atol=1e-4)


def test_a_killed_training_goes_on_to_the_same_bits(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """Checkpoints have none of the target's weights."""
    whole = train(new_student(new_target(weights)), tmp_path / "whole", report_every_s=0.0)
    for killed_after in (2, 5):
        with pytest.raises(KilledError):
            train(new_student(new_target(weights)), tmp_path / "parts", killed_after=killed_after, report_every_s=0.0)
    parts = train(new_student(new_target(weights)), tmp_path / "parts", report_every_s=0.0)
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert all(name.startswith("weights.") for name in whole)


def accepted(folder: Path, adapter: Path) -> int:
    """Return how many draft tokens after each first one are the target's own, where it writes 6 texts by itself."""
    spec = ModelSpec(name="target", path=str(folder), device="cpu", threads=1, slots=2, max_length=64)
    heads = HeadsSpec(name="heads", path=str(adapter), kind="self", min_acceptance=0.0)
    runner, _, proposer = load_with_heads(spec, heads)
    assert runner.hidden is not None
    count = 0
    for chat in HELD_OUT:
        text = [*chat.prompt]
        for _ in range(8):
            text.append(int(runner.logits([RowInput(0, 0, text, wanted=1)])[-1].argmax()))
        for length in range(len(chat.prompt) + 1, len(text) - 3):
            runner.logits([RowInput(0, 0, text[: length - 1])])
            proposer.read([Reading(0, 0, text[1:length], [], None, text[0])], runner.hidden)
            (choices,) = proposer.propose([DraftStart(0, length, SamplingParams(max_tokens=9, temperature=0))], 4, 2)
            drafted = [choice.tokens[0] for choice in choices]
            assert drafted[0] == text[length]
            count += next((i for i in range(1, 4) if drafted[i] != text[length + i]), 4) - 1
    return count


def test_a_trained_adapter_drafts_more_than_an_untrained_one(weights: dict[str, Tensor], tmp_path: Path) -> None:
    target = new_target(weights)
    target.save_pretrained(tmp_path / "target")
    student = new_student(target, rank=16)
    student.adapted.save_pretrained(tmp_path / "untrained")
    before = held_out_rates(student, HELD_OUT, tokens=64, longest=64)
    train(student, tmp_path / "checkpoints", epochs=80, save_every_s=60.0)
    after = held_out_rates(student, HELD_OUT, tokens=64, longest=64)
    student.adapted.save_pretrained(tmp_path / "trained")
    for early, late in zip(before, after, strict=True):
        assert late.shared_noise[0] == early.shared_noise[0]  # the target's own
        assert late.shared_noise[1] > early.shared_noise[1] + 0.1
    counts = [accepted(tmp_path / "target", tmp_path / name) for name in ("untrained", "trained")]
    assert counts[1] > 2 * counts[0] + 5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of peft, about experts
def test_targets_that_can_not_be_trained_so_are_named() -> None:
    for name, options, message in (
        ("llama", {"steps": 1}, "--steps 1: the first token"),
        ("mistral-window", {}, "layers that don't see all of a text"),
        ("qwen3-moe", {}, "has experts, which take no adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_student(tiny_model(name), **options)
