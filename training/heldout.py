"""Held-out prompts, for tests and benchmarks. Must not know about models."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from training.corpus import Document, Kind

PROMPTS: Mapping[Kind, int] = {"library": 200, "tests": 60, "topics": 60}
TOKENS = range(24, 121)


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


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file that `write_prompts` wrote."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


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
