"""Committed texts as batches for a drafter, and which of them are held out. Must not know models.

B rows, T tokens, N answer tokens in the batch.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from actors.loops.adaptation import CommittedText
from decoding.sampling.params import SamplingParams
from training.distillation.vocabulary import StudentVocabulary

LONGEST = 1024  # tokens of a text, its last ones
_TOKENS = 512  # of a batch: small ones, for recent texts are few
_HELD_OUT = 4  # every fourth text is never learned


@dataclass(frozen=True, slots=True, eq=False)
class TextBatch:
    """Rows padded on the right. Causal attention keeps the padding from what counts, so there is no mask."""

    tokens: Tensor  # [B, T] int64, rows of the drafter's vocabulary
    counted: Tensor  # [B, T] bool, True where the next token is one of the answer's; N in all
    answers: Tensor  # [N] int64, the target's ids of the answers' tokens
    temperatures: Tensor  # [N] float32, 1 where the text is greedy
    requests: Sequence[tuple[SamplingParams, int, int]]  # parameters, first position, tokens of each answer

    @classmethod
    def gather(cls, texts: Sequence[CommittedText], vocabulary: StudentVocabulary) -> "TextBatch":
        """Return texts as a batch."""
        rows, counted, answers, temperatures, requests = [], [], [], [], []
        for text in texts:
            cut = max(0, len(text.tokens) - LONGEST)
            first = max(text.prompt_length - cut, 1)  # of the answer that is left
            tokens = torch.tensor(text.tokens[cut:])
            rows.append(tokens[:-1])
            counted.append(torch.arange(len(tokens) - 1) >= first - 1)
            answers.append(tokens[first:])
            temperature = 1.0 if text.params.greedy else text.params.temperature
            temperatures.append(torch.full((len(tokens) - first,), temperature))
            requests.append((text.params, first + cut, len(tokens) - first))
        return cls(
            tokens=vocabulary.read(pad_sequence(rows, batch_first=True)),
            counted=pad_sequence(counted, batch_first=True),
            answers=torch.cat(answers),
            temperatures=torch.cat(temperatures),
            requests=requests,
        )


class RecentTexts:
    """The most recent texts, in memory only: those to learn, and those that tell what was learned."""

    def __init__(self, most: int) -> None:
        self._held_out: deque[CommittedText] = deque(maxlen=max(most // _HELD_OUT, 1))
        self._training: deque[CommittedText] = deque(maxlen=max(most - most // _HELD_OUT, 1))
        self._seen = 0
        self.new = 0  # since the last `start_round`

    def add(self, texts: Sequence[CommittedText]) -> None:
        """Add texts, the newest last."""
        for text in texts:
            (self._training if self._seen % _HELD_OUT else self._held_out).append(text)
            self._seen += 1
        self.new += len(texts)

    def start_round(self) -> tuple[list[list[CommittedText]], list[list[CommittedText]]]:
        """Return batches to learn from, in random order, and batches that are held out."""
        self.new = 0
        batches = _packed(self._training)
        random.Random(self._seen).shuffle(batches)
        return batches, _packed(self._held_out)


def _packed(texts: Sequence[CommittedText]) -> list[list[CommittedText]]:
    """Fill batches with texts of similar length."""
    batches: list[list[CommittedText]] = []
    for text in sorted(texts, key=_length):
        if not batches or (len(batches[-1]) + 1) * _length(text) > _TOKENS:
            batches.append([])
        batches[-1].append(text)
    return batches


def _length(text: CommittedText) -> int:
    return min(len(text.tokens), LONGEST)
