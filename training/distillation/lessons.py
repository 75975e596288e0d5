"""Chats as batches for a student: rows of similar length, and the teacher's candidates in the student's vocabulary.

Must not know about losses or models. B rows, T tokens, N answer tokens in the batch, K candidates, F features.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.distillation.vocabulary import StudentVocabulary
from training.texts import Chat

_SORTED_TOGETHER = 32  # batches; longer runs waste less padding, and are less random


class FeatureSlice(Protocol):
    """What a teacher computed along a chat."""

    def read(self) -> Tensor:
        """Return a row for each of the chat's tokens that are not cut off, [T, F]."""


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
        """Return the batch on a device."""
        tensors = (self.tokens, self.counted, self.candidates, self.known, self.logprobs, self.is_drawn)
        features = None if self.features is None else self.features.to(device, non_blocking=True)
        tokens, counted, candidates, known, logprobs, is_drawn = (
            tensor.to(device, non_blocking=True) for tensor in tensors
        )
        return Batch(tokens, counted, candidates, known, logprobs, is_drawn, features)

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
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._longest = longest
        self._seed = seed

    def schedule(self, epochs: int) -> list[list[int]]:
        """Return the chats of each batch of all epochs, by their indices. More epochs begin with the same batches."""
        return [batch for epoch in range(epochs) for batch in self._epoch(epoch)]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these chats."""
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
        return Batch(
            tokens=self._vocabulary.read(pad_sequence(rows, batch_first=True)),
            counted=pad_sequence(counted, batch_first=True),
            candidates=drafted,
            known=known,
            logprobs=torch.cat(logprobs).float(),
            is_drawn=ids == torch.cat(answers)[:, None],
            features=None if self._features is None else self._padded([self._features[index] for index in indices]),
        )

    @staticmethod
    def _padded(features: Sequence[FeatureSlice]) -> Tensor:
        return pad_sequence([each.read()[:-1] for each in features], batch_first=True)

    def _epoch(self, number: int) -> list[list[int]]:
        rng = random.Random(f"{self._seed}/{number}")
        order = list(range(len(self._chats)))
        rng.shuffle(order)
        mean = sum(map(self._length, order)) / max(len(order), 1)
        together = max(round(_SORTED_TOGETHER * self._tokens / max(mean, 1)), 1)
        batches: list[list[int]] = []
        for start in range(0, len(order), together):
            batches += self._packed(sorted(order[start : start + together], key=self._length))
        rng.shuffle(batches)
        return batches

    def _length(self, index: int) -> int:
        chat = self._chats[index]
        return min(len(chat.prompt) + len(chat.tokens), self._longest)

    def _packed(self, ascending: Sequence[int]) -> list[list[int]]:
        """Fill batches with chats of ascending length."""
        batches: list[list[int]] = [[]]
        for index in ascending:
            if batches[-1] and (len(batches[-1]) + 1) * self._length(index) > self._tokens:
                batches.append([])
            batches[-1].append(index)
        return batches
