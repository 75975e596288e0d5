"""Endless packed rows of training tokens, mixed by kind. Must not know about models."""

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.tiny.corpus import Document, Kind, cut
from training.tiny.tokenizer import conversation_text

Mix = Mapping[Kind, float]
TARGET_MIX: Mix = {"library": 0.60, "tests": 0.20, "topics": 0.10, "chat": 0.10}
MEMBER_MIX: Mix = {"library": 0.45, "tests": 0.30, "topics": 0.12, "chat": 0.13}


def encode(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> dict[Kind, list[list[int]]]:
    """Return token pieces by kind. Each starts with BOS; EOS ends a document's last piece and each chat turn."""
    generator = random.Random(seed)
    texts: dict[Kind, list[str]] = {}
    for document in documents:
        if document.turns:
            texts.setdefault(document.kind, []).append(conversation_text(document.turns))
            continue
        for piece in cut(document, generator):
            text = piece.text + str(tokenizer.eos_token) if piece.last else piece.text
            texts.setdefault(document.kind, []).append(text)
    return {kind: tokenizer(pieces, verbose=False)["input_ids"] for kind, pieces in texts.items()}


class Stream:
    """Cuts rows from shuffled pieces, with a given share of tokens for each kind."""

    def __init__(self, pieces: Mapping[Kind, Sequence[Sequence[int]]], mix: Mix, *, seed: int) -> None:
        generator = random.Random(seed)
        self._pieces = {kind: _shuffled(pieces[kind], generator) for kind in mix}
        self._mix = mix
        self._used: dict[Kind, int] = dict.fromkeys(mix, 0)
        self._rest: list[int] = []

    def rows(self, count: int, length: int) -> Tensor:
        """Return the next `count` rows.

        Returns:
            int64, (count, length)
        """
        while len(self._rest) < count * length:
            self._rest.extend(self._next_piece())
        taken, self._rest = self._rest[: count * length], self._rest[count * length :]
        return torch.tensor(taken).view(count, length)

    def prompts(self, count: int, length: int) -> Tensor:
        """Return the first `length` tokens of the next `count` pieces that are longer.

        Returns:
            int64, (count, length)
        """
        prompts: list[Sequence[int]] = []
        while len(prompts) < count:
            piece = self._next_piece()
            if len(piece) > length:
                prompts.append(piece[:length])
        return torch.tensor(prompts)

    def _next_piece(self) -> Sequence[int]:
        kind = min(self._mix, key=lambda kind: self._used[kind] / self._mix[kind])
        piece = next(self._pieces[kind])
        self._used[kind] += len(piece)
        return piece


def _shuffled(pieces: Sequence[Sequence[int]], generator: random.Random) -> Iterator[Sequence[int]]:
    while True:
        yield from generator.sample(pieces, len(pieces))
