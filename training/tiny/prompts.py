"""Prompts from the corpus: the held-out ones for tests and benchmarks, and those that the target continues.

Must not know about models.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from training.tiny.corpus import Document, Kind
from training.tiny.stream import Stream

PROMPTS: Mapping[Kind, int] = {"library": 200, "tests": 60, "topics": 60}
TOKENS = range(24, 121)
TRAINING_TOKENS = range(16, 97)


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
    pieces = [stream.prompts(1, generator.choice(TRAINING_TOKENS))[0] for _ in range(count)]
    return [str(tokenizer.decode(piece, skip_special_tokens=True)) for piece in pieces]


def _draw(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, generator: random.Random) -> str:
    """Return consecutive lines of a random document, without the last newline."""
    while True:
        document = generator.choice(documents)
        lines = document.text.splitlines(keepends=True)
        start, wanted = generator.randrange(len(lines)), generator.randint(80, 320)
        text = ""
        while start < len(lines) and len(text) < wanted:
            text += lines[start]
            start += 1
        text = text.rstrip("\n")
        if text.strip() and len(tokenizer(text)["input_ids"]) in TOKENS:
            return text
