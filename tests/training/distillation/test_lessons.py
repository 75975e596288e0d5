"""Batches of chats: everything once an epoch, answers only, in the student's rows."""

from itertools import chain

import torch

from tests.training.distillation.chats import CANDIDATES, TOKENS, make_chats
from training.distillation.lessons import Lessons, StudentVocabulary, most_used

ALL = StudentVocabulary(torch.arange(TOKENS), TOKENS)


def make_lessons(vocabulary: StudentVocabulary = ALL, *, tokens: int = 64, longest: int = 99) -> Lessons:
    return Lessons(make_chats(30), vocabulary, tokens=tokens, longest=longest, seed=5)


def test_an_epoch_has_every_chat_once_in_an_order_of_its_own() -> None:
    lessons = make_lessons()
    first, both = lessons.schedule(1), lessons.schedule(2)
    assert sorted(chain.from_iterable(first)) == list(range(30))
    assert both[: len(first)] == first
    assert sorted(chain.from_iterable(both[len(first) :])) == list(range(30))
    assert both[len(first) :] != first


def test_batches_keep_to_their_tokens() -> None:
    lessons = make_lessons()
    for indices in lessons.schedule(2):
        assert lessons.batch(indices).tokens.numel() <= 64


def test_the_tokens_before_an_answer_s_are_counted() -> None:
    batch = make_lessons().batch([0, 8])
    chats = make_chats(30)
    for row, chat in zip((0, 1), (chats[0], chats[8]), strict=True):
        text = [*chat.prompt, *chat.tokens]
        assert batch.tokens[row, : len(text) - 1].tolist() == text[:-1]
        assert batch.counted[row].nonzero().flatten().tolist() == list(range(len(chat.prompt) - 1, len(text) - 1))
    assert batch.candidates.shape == (int(batch.counted.sum()), CANDIDATES)
    assert batch.candidates[:, 0].tolist() == [*chats[0].tokens, *chats[8].tokens]
    assert batch.is_drawn[:, 0].all()
    assert not batch.is_drawn[:, 1:].any()


def test_a_long_text_is_cut() -> None:
    batch = make_lessons(longest=6).batch([0])
    assert batch.tokens.shape == (1, 5)
    assert len(batch.candidates) == 4


def test_tokens_that_the_student_lacks_are_read_and_never_drafted() -> None:
    rows = torch.full((TOKENS,), 20)
    rows[::2] = torch.arange(20)
    chats = make_chats(30)
    batch = make_lessons(StudentVocabulary(rows, 20)).batch([0])
    text = [*chats[0].prompt, *chats[0].tokens][:-1]
    assert batch.tokens[0].tolist() == [token // 2 if token % 2 == 0 else 20 for token in text]
    assert batch.known.tolist() == (chats[0].candidates % 2 == 0).tolist()
    assert int(batch.candidates.max()) < 20


def test_most_used_tokens_are_the_most_expected() -> None:
    chats = make_chats(30)
    use = torch.zeros(TOKENS, dtype=torch.float64)
    for chat in chats:
        use.index_add_(0, chat.candidates.flatten().long(), chat.logprobs.flatten().double().exp())
    kept = most_used(chats, 10, special=[0, 1])
    assert kept == sorted({*use.argsort(descending=True, stable=True)[:10].tolist(), 0, 1})
