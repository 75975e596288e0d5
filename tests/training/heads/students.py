"""Heads as students of made-up chats, with made-up hidden states from which the next tokens follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.heads.medusa import MedusaHeads
from tests.training.distillation.chats import TOKENS, make_chats, make_model
from training.distillation.lessons import Lessons, StudentVocabulary
from training.heads.eagle3 import Eagle3Student, start_head
from training.heads.medusa import MedusaStudent
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
        tokens = torch.tensor([*self.chat.prompt, *self.chat.tokens])
        table = torch.randn(TOKENS, 3 * SIZE, generator=torch.Generator().manual_seed(4))
        return table[tokens].bfloat16()


def lessons(chats: Sequence[Chat] | None = None) -> Lessons:
    chats = make_chats(24) if chats is None else chats
    return Lessons(chats, VOCABULARY, tokens=64, longest=64, seed=1, features=[MadeUp(chat) for chat in chats])


def eagle3_student(steps: int = 3) -> Eagle3Student:
    features = torch.cat([MadeUp(chat).read() for chat in make_chats(2)])
    head = start_head(MODEL, IDS, features, seed=0)
    embedding = MODEL.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return Eagle3Student(head, embedding.detach(), VOCABULARY, steps=steps)


def medusa_student() -> MedusaStudent:
    torch.manual_seed(0)
    rows = torch.randn(len(IDS), SIZE)
    return MedusaStudent(MedusaHeads(3, 1, SIZE), nn.Identity(), rows, VOCABULARY)
