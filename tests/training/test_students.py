"""Heads as students of made-up chats, with made-up hidden states from which the next tokens follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.sampling.params import SamplingParams
from engine.heads.chain_proposer import ChainProposer
from engine.heads.eagle3 import Eagle3Head
from engine.heads.medusa import MedusaHeads
from engine.heads.proposer import DraftStart, Reading
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.heads import STATES, new_eagle3
from tests.support.models import tiny_model
from tests.training.distillation.chats import TOKENS, KilledError, killing, make_chats, make_model
from training.dflash_student import DFlashShape, DFlashStudent, start_dflash
from training.distillation.lessons import Lessons, Student, StudentVocabulary
from training.distillation.loop import DistillationOptions, distil
from training.distillation.rates import held_out_rates
from training.eagle3_student import Eagle3Student, start_eagle3, unroll
from training.medusa_student import MedusaStudent
from training.texts import Chat

MODEL = make_model()
SIZE = 16
IDS = list(range(1, TOKENS))
VOCABULARY = StudentVocabulary.of_heads(IDS, TOKENS)


@dataclass(frozen=True)
class MadeUp:
    """Hidden states of a chat."""

    chat: Chat

    def read(self) -> Tensor:
        tokens = torch.tensor([*self.chat.prompt, *self.chat.tokens][:-1])
        table = torch.randn(TOKENS, 3 * SIZE, generator=torch.Generator().manual_seed(4))
        return table[tokens].bfloat16()


def lessons(chats: Sequence[Chat] | None = None) -> Lessons:
    chats = make_chats(24) if chats is None else chats
    return Lessons(chats, VOCABULARY, tokens=64, longest=64, seed=1, features=[MadeUp(chat) for chat in chats])


def eagle3_student(steps: int = 3) -> Eagle3Student:
    features = torch.cat([MadeUp(chat).read() for chat in make_chats(2)])
    head = start_eagle3(MODEL, IDS, features, seed=0)
    embedding = MODEL.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return Eagle3Student(head, embedding.detach(), VOCABULARY, steps=steps)


def medusa_student() -> MedusaStudent:
    torch.manual_seed(0)
    rows = torch.randn(len(IDS), SIZE)
    return MedusaStudent(MedusaHeads(3, 1, SIZE), nn.Identity(), rows, VOCABULARY)


def dflash_student() -> DFlashStudent:
    shape = DFlashShape(layers=2, block_size=4, states=3, mask_token_id=0)
    embedding = MODEL.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    features = torch.cat([MadeUp(chat).read() for chat in make_chats(2)])
    return DFlashStudent(start_dflash(MODEL, IDS, features, shape, seed=0), embedding.detach(), VOCABULARY)


OPTIONS = DistillationOptions(epochs=4, learning_rate=2e-2, device="cpu", bfloat16=False, save_every_s=0.0)
RATES = {eagle3_student: 2e-2, medusa_student: 0.4, dflash_student: 4e-2}
KINDS = pytest.mark.parametrize("new", list(RATES))


def train(student: Student, folder: Path, *, killed_after: int | None = None, **more: Any) -> dict[str, torch.Tensor]:
    distil(student, lessons(), replace(OPTIONS, report_every_s=0.0, **more), folder, report=killing(killed_after))
    return student.module.state_dict()


def shortened(chat: Chat, length: int) -> Chat:
    return replace(
        chat,
        tokens=chat.tokens[:length],
        candidates=chat.candidates[:length],
        logprobs=chat.logprobs[:length],
    )


@pytest.mark.parametrize("new", [eagle3_student, medusa_student])
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
    train(student, tmp_path, epochs=60, learning_rate=RATES[new], save_every_s=60.0)
    after = held_out_rates(student, chats, tokens=64, longest=64, features=features)
    for early, late in zip(before, after, strict=True):
        assert late.agreement > early.agreement + 0.3
        assert late.shared_noise[1] > early.shared_noise[1] + 0.1
        assert late.shared_noise == sorted(late.shared_noise, reverse=True)


@torch.no_grad()
def test_blocks_of_a_batch_are_those_of_each_text_alone() -> None:
    """Up to its anchor: a block sees nothing that is not there yet when it is drafted."""
    student = dflash_student()
    chats = make_chats(24)
    batch = lessons(chats).batch([0, 1, 5])
    answers = [(chats[index], position) for index in (0, 1, 5) for position in range(len(chats[index].tokens))]
    drafts = list(student.drafts(student.module, batch, 8))
    assert len(drafts) == 3
    assert len(drafts[0][0]) == -(-sum(position > 0 for _, position in answers) // 3)
    for step, (starts, logits) in enumerate(drafts):
        for start, drafted in zip(starts.tolist(), logits, strict=True):
            chat, position = answers[start]
            assert 0 < position < len(chat.tokens) - step
            anchor = len(chat.prompt) + position - 1
            token = torch.tensor([[[*chat.prompt, *chat.tokens][anchor]]])
            embeddings = MODEL.get_input_embeddings()(student.head.blocks(token))
            alone = student.head(MadeUp(chat).read()[None, :anchor].float(), embeddings, torch.tensor([[anchor]]))
            torch.testing.assert_close(drafted, student.head.logits(alone[0, 0, 1 + step]))


def test_heads_without_a_token_can_not_draft_it() -> None:
    student = eagle3_student()
    known, rows = student.vocabulary.find(torch.tensor([0, 1, 39]))
    assert known.tolist() == [False, True, True]
    assert rows.tolist() == [0, 0, 38]
    assert student.vocabulary.read(torch.tensor([0, 39])).tolist() == [0, 39]


TARGET = tiny_model("llama-gqa")
TEXT = [5, 9, 14, 3, 27, 8, 11, 2, 19]
STEPS = 5


def served(head: Eagle3Head, text: list[int]) -> list[int]:
    runner = Runner(TARGET, slots=2, max_length=64, max_query=64)
    runner.keep_hidden_states(STATES)
    runner.logits([RowInput(0, 0, text[:-1])])
    assert runner.hidden is not None
    proposer = ChainProposer(head.eval().requires_grad_(False), runner)
    rows = list(range(len(text) - 1))
    proposer.read([Reading(0, 0, text[1:], rows, rows[-1], text[0])], runner.hidden)
    start = DraftStart(0, len(text), SamplingParams(max_tokens=1, temperature=0))
    (choices,) = proposer.propose([start], STEPS, 2)
    return [choice.tokens[0] for choice in choices]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@torch.no_grad()
def test_a_served_head_drafts_what_the_unrolled_one_does(norm_before_residual: bool) -> None:
    head = new_eagle3(TARGET, norm_before_residual=norm_before_residual)
    drafted = served(head, TEXT)
    runner = Runner(TARGET, slots=2, max_length=64, max_query=64)
    tokens = [*TEXT, *drafted]
    features = runner.hidden_states([RowInput(0, 0, tokens)], STATES).layers
    embedding = TARGET.get_input_embeddings()
    outputs = unroll(head, features[None], embedding(torch.tensor([tokens])), STEPS)
    last = len(TEXT) - 2  # the last token whose states the target has left
    assert [int(head.logits(output[0, last]).argmax()) for output in outputs] == drafted


@torch.no_grad()
def test_a_draft_does_not_see_what_follows_its_start() -> None:
    head = new_eagle3(TARGET)
    features, embeddings = torch.randn(1, 8, head.fc.in_features), torch.randn(1, 8, head.hidden_size)
    changed = features.clone()
    changed[:, 4:] += 1
    for before, after in zip(unroll(head, features, embeddings, 3), unroll(head, changed, embeddings, 3), strict=True):
        assert torch.allclose(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])
