"""Endless packed rows of training tokens, mixed by kind; the bundled models' recipes; prompts from the corpus."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny.corpus import Document, Kind, cut

Mix = Mapping[Kind, float]
TARGET_MIX: Mix = {"library": 0.60, "tests": 0.20, "topics": 0.10, "chat": 0.10}
MEMBER_MIX: Mix = {"library": 0.45, "tests": 0.30, "topics": 0.12, "chat": 0.13}
Name = Literal["target", "member", "drafter"]
PROMPTS: Mapping[Kind, int] = {"library": 200, "tests": 60, "topics": 60}
TOKENS = range(24, 121)
TRAINING_TOKENS = range(16, 97)


def encode(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> dict[Kind, list[list[int]]]:
    """Return token pieces by kind. Each starts with BOS; EOS ends a document's last piece and each chat turn."""
    generator = random.Random(seed)
    eos = str(tokenizer.eos_token)
    texts: dict[Kind, list[str]] = defaultdict(list)
    for document in documents:
        if document.question is not None:
            texts[document.kind].append(f"<|user|>{document.question}{eos}<|assistant|>{document.text}{eos}")
        elif pieces := cut(document.text, generator):
            texts[document.kind] += [*pieces[:-1], pieces[-1] + eos]
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
        """Return the next rows, [count, length] int64."""
        while len(self._rest) < count * length:
            self._rest.extend(self._next_piece())
        taken, self._rest = self._rest[: count * length], self._rest[count * length :]
        return torch.tensor(taken).view(count, length)

    def prompt(self, length: int) -> list[int]:
        """Return the first `length` tokens of the next piece that is longer."""
        while True:
            piece = self._next_piece()
            if len(piece) > length:
                return list(piece[:length])

    def _next_piece(self) -> Sequence[int]:
        kind = min(self._mix, key=lambda kind: self._used[kind] / self._mix[kind])
        piece = next(self._pieces[kind])
        self._used[kind] += len(piece)
        return piece


def _shuffled(pieces: Sequence[Sequence[int]], generator: random.Random) -> Iterator[Sequence[int]]:
    while True:
        yield from generator.sample(pieces, len(pieces))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size, training mix and seed of one bundled model."""

    hidden: int
    layers: int
    intermediate: int
    kv_heads: int
    mix: Mix
    seed: int


RECIPES: dict[Name, Recipe] = {
    "target": Recipe(hidden=256, layers=6, intermediate=704, kv_heads=2, mix=TARGET_MIX, seed=1),
    "member": Recipe(hidden=256, layers=6, intermediate=704, kv_heads=2, mix=MEMBER_MIX, seed=2),
    "drafter": Recipe(hidden=192, layers=2, intermediate=320, kv_heads=3, mix=TARGET_MIX, seed=3),
}


def write_prompts(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, path: Path, *, seed: int) -> None:
    """Write one `{"prompt": text}` per line, cut from the held-out documents."""
    generator = random.Random(seed)
    prompts: list[str] = []
    for kind, count in PROMPTS.items():
        sources = [document for document in documents if document.held_out and document.kind == kind]
        distinct: dict[str, None] = {}
        while len(distinct) < count:
            distinct[_draw(sources, tokenizer, generator)] = None
        prompts += distinct
    generator.shuffle(prompts)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def training_prompts(stream: Stream, tokenizer: PreTrainedTokenizerFast, count: int, *, seed: int) -> list[str]:
    """Return the beginnings of the next `count` pieces, without special tokens."""
    generator = random.Random(seed)
    pieces = [stream.prompt(generator.choice(TRAINING_TOKENS)) for _ in range(count)]
    return [str(tokenizer.decode(piece, skip_special_tokens=True)) for piece in pieces]


def _draw(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> str:
    """Return consecutive lines of a random document, without the last newline."""
    while True:
        lines = generator.choice(documents).text.splitlines(keepends=True)
        start, wanted = generator.randrange(len(lines)), generator.randint(80, 320)
        text = ""
        for line in lines[start:]:
            if len(text) >= wanted:
                break
            text += line
        text = text.rstrip("\n")
        if text.strip() and len(tokenizer(text)["input_ids"]) in TOKENS:
            return text
