"""Chats as batches for a student: rows of similar length, and the teacher's candidates in the student's vocabulary.

B rows, T tokens, N answer tokens in the batch, K candidates, F features.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from transformers import PreTrainedModel

from engine.loading.draft_vocabulary import DraftVocabulary, load_draft_vocabulary
from engine.loading.settings import is_trimmed, vocabulary_size
from training.texts import Chat

T = TypeVar("T")

_SORTED_TOGETHER = 32  # batches; longer runs waste less padding, and are less random


class StudentVocabulary:
    """The target's tokens as a student's rows."""

    def __init__(self, rows: Tensor, drafted: int, *, reads_rows: bool = True) -> None:
        """
        rows: [V] int64, the row of each of the target's tokens.
        drafted: so many rows stand for one token each.
        reads_rows: whether the student reads rows; otherwise it reads the target's tokens.
        """
        self._rows, self._reads_rows = rows, reads_rows
        self.drafted = drafted

    @classmethod
    def of_model(cls, model: PreTrainedModel, folder: str, revision: str | None = None) -> "StudentVocabulary":
        """Return the vocabulary of a model. Raises ConfigError if it is trimmed, and its file of ids does not fit."""
        size = vocabulary_size(model.config)
        if not is_trimmed(model.config):
            return cls(torch.arange(size), size)
        token_ids = load_draft_vocabulary(folder, model.config, revision)
        return cls(DraftVocabulary(token_ids, size).rows, len(token_ids))

    @property
    def tokens(self) -> Tensor:
        """Return the token of each row that can be drafted, [N] int64."""
        known = (self._rows < self.drafted).nonzero()[:, 0]
        return known[self._rows[known].argsort()]

    @classmethod
    def of_heads(cls, token_ids: Sequence[int], size: int) -> "StudentVocabulary":
        """Return the vocabulary of heads, which read the target's own tokens. size: of the target's vocabulary, V."""
        rows = torch.full((size,), len(token_ids))
        rows[torch.tensor(token_ids)] = torch.arange(len(token_ids))
        return cls(rows, len(token_ids), reads_rows=False)

    def read(self, tokens: Tensor) -> Tensor:
        """Return tokens as the student reads them, int64, of any shape."""
        return self._rows[tokens.long()] if self._reads_rows else tokens.long()

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens can be drafted, bool, and their rows, int64, 0 for the others. Of any shape."""
        rows = self._rows[tokens.long()]
        known = rows < self.drafted
        return known, rows * known


def most_used(chats: Iterable[Chat], count: int, special: Sequence[int]) -> list[int]:
    """Return the special tokens and the `count` tokens that a target writes most, ascending.

    A token counts with its probability at every position, so that few texts tell much. FR-Spec (arXiv 2502.14856)
    keeps the most frequent tokens.
    """
    pairs = [(chat.candidates.flatten().long(), chat.logprobs.flatten().double().exp()) for chat in chats]
    tokens, weights = (torch.cat(column) for column in zip(*pairs, strict=True))
    use = torch.zeros(int(tokens.max()) + 1, dtype=torch.float64).index_add_(0, tokens, weights)
    return sorted({*use.argsort(descending=True, stable=True)[:count].tolist(), *special})


def packed(texts: Iterable[T], length: Callable[[T], int], tokens: int) -> list[list[T]]:
    """Fill batches of at most so many tokens, padding included, with texts of similar length; one may be longer."""
    batches: list[list[T]] = []
    for text in sorted(texts, key=length):
        if not batches or (len(batches[-1]) + 1) * length(text) > tokens:
            batches.append([])
        batches[-1].append(text)
    return batches


class FeatureSlice(Protocol):
    """What a teacher computed along a chat."""

    def read(self) -> Tensor:
        """Return a row for each of the chat's tokens but the last of those that are not cut off, [T - 1, F]."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows padded on the right. Causal attention keeps the padding from what counts, so there is no mask."""

    tokens: Tensor  # [B, T] int64, rows of the student's vocabulary
    counted: Tensor  # [B, T] bool, True where the next token is one of the answer's; N in all
    candidates: Tensor  # [N, K] int64, rows of the student's vocabulary
    known: Tensor  # [N, K] bool, whether the student has the candidate; its row is 0 if not
    logprobs: Tensor  # [N, K] float32, of the candidates at temperature 1
    is_drawn: Tensor  # [N, K] bool, the candidate that the text has
    features: Tensor | None = None  # [B, T, F] of the teacher after each token

    @property
    def first(self) -> Tensor:
        """[N] bool, whether it is its answer's first token."""
        lengths = self.counted.sum(-1)
        first = torch.zeros(len(self.candidates), dtype=torch.bool, device=lengths.device)
        first[lengths.cumsum(0) - lengths] = True
        return first

    def to(self, device: torch.device) -> "Batch":
        moved: list[Any] = [getattr(self, each.name) for each in fields(self)]
        moved = [tensor if tensor is None else tensor.to(device, non_blocking=True) for tensor in moved]
        return Batch(*moved)

    def starts(self, step: int) -> Tensor:
        """Return the answer tokens, of all N, after which `step` more follow in the same answer, [n] int64."""
        lengths = self.counted.sum(-1)
        left = lengths.cumsum(0).repeat_interleave(lengths) - torch.arange(len(self.candidates), device=lengths.device)
        return (left > step).nonzero()[:, 0]


class Lessons:
    """Batches of about `tokens` tokens each. Their order follows from the seed and the epoch alone."""

    def __init__(
        self,
        chats: Sequence[Chat],
        vocabulary: StudentVocabulary,
        *,
        tokens: int,
        longest: int,
        seed: int,
        features: Sequence[FeatureSlice] | None = None,
    ) -> None:
        """
        longest: tokens of a row; what is beyond is cut off.
        features: of each chat, if the student reads any.
        """
        kept = [index for index, chat in enumerate(chats) if chat.tokens and len(chat.prompt) < longest]
        self._chats = [chats[index] for index in kept]
        self._features = None if features is None else [features[index] for index in kept]
        self._vocabulary, self._tokens, self._longest, self._seed = vocabulary, tokens, longest, seed

    def schedule(self, epochs: int) -> list[list[int]]:
        """Return the chats of each batch of all epochs, by their indices. More epochs begin with the same batches."""
        return [batch for epoch in range(epochs) for batch in self._epoch(epoch)]

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, counted, candidates, logprobs, answers = [], [], [], [], []
        for index in indices:
            chat, length = self._chats[index], self._length(index)
            tokens = torch.tensor([*chat.prompt, *chat.tokens])[:length]
            rows.append(tokens[:-1])
            counted.append(torch.arange(length - 1) >= len(chat.prompt) - 1)
            candidates.append(chat.candidates[: length - len(chat.prompt)])
            logprobs.append(chat.logprobs[: length - len(chat.prompt)])
            answers.append(tokens[len(chat.prompt) :])
        ids = torch.cat(candidates)
        known, drafted = self._vocabulary.find(ids)
        features = None
        if self._features is not None:
            features = pad_sequence([self._features[index].read() for index in indices], batch_first=True)
        return Batch(
            tokens=self._vocabulary.read(pad_sequence(rows, batch_first=True)),
            counted=pad_sequence(counted, batch_first=True),
            candidates=drafted,
            known=known,
            logprobs=torch.cat(logprobs).float(),
            is_drawn=ids == torch.cat(answers)[:, None],
            features=features,
        )

    def _epoch(self, number: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed}/{number}")
        order = list(range(len(self._chats)))
        rng.shuffle(order)
        mean = sum(map(self._length, order)) / max(len(order), 1)
        together = max(round(_SORTED_TOGETHER * self._tokens / max(mean, 1)), 1)
        batches: list[list[int]] = []
        for start in range(0, len(order), together):
            batches += packed(order[start : start + together], self._length, self._tokens)
        rng.shuffle(batches)
        return batches

    def _length(self, index: int) -> int:
        chat = self._chats[index]
        return min(len(chat.prompt) + len(chat.tokens), self._longest)


class Student(Protocol):
    """A network that drafts tokens of its teacher."""

    module: nn.Module
    vocabulary: StudentVocabulary  # of the tokens that it drafts

    def steps(self, share: float) -> int:
        """Return the tokens of a draft that it is trained on, where that share of the training is over."""

    def optimizers(self, learning_rate: float) -> list[Optimizer]:
        """Return the optimizers of all weights that are trained."""

    def drafts(self, module: nn.Module, batch: Batch, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the starts and logits of the first, second, … token of the drafts from all starts of a batch.

        A start is the index of the answer token, of N, that a draft's first token stands for; step s of it stands for
        the answer token s later. At most `steps` pairs: [n] int64 ascending, and [n, W] over the student's rows.
        module: `self.module`, which may be wrapped.
        """
