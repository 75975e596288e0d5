"""A task whose answer can be checked: facts hidden in long text, and a question about one of them. Knows no models."""

import random
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from transformers import PreTrainedTokenizerBase

_THINGS = ("box", "door", "boat", "lamp", "tower", "wagon", "garden", "bridge", "drum", "kite")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "grey", "brown")
_FILLER = (
    "The morning was quiet and the street was almost empty.",
    "Some people walked to the market, and others stayed at home.",
    "It had rained during the night, so the grass was wet.",
    "Nobody knew exactly when the next train would arrive.",
    "A dog slept in the sun while children played nearby.",
    "The old clock in the hall struck nine times.",
)
_FACT_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Task:
    """A document with hidden facts, a question about one of them, and the answer."""

    document: str
    question: str  # with the beginning of the answer
    answer: str

    @property
    def prompt(self) -> str:
        return f"{self.document}\n\n{self.question}"


def make_task(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, *, facts: int) -> Task:
    """Make a task of about so many tokens."""
    drawn = random.Random(seed)
    names = drawn.sample(list(product(_COLOURS, _THINGS)), facts)
    numbers = [str(drawn.randrange(1000, 10_000)) for _ in names]
    hidden = [
        f"The code of the {colour} {thing} is {number}." for (colour, thing), number in zip(names, numbers, strict=True)
    ]
    sentences: list[str] = []
    per_sentence = fmean(len(tokenizer(text).input_ids) for text in _FILLER)
    while len(sentences) * per_sentence < tokens - _FACT_TOKENS * facts:
        sentences.append(drawn.choice(_FILLER))
    for fact in hidden:
        sentences.insert(drawn.randrange(len(sentences) + 1), fact)
    paragraphs = [" ".join(sentences[start : start + 6]) for start in range(0, len(sentences), 6)]
    asked = drawn.randrange(facts)
    name = f"{names[asked][0]} {names[asked][1]}"
    question = f"Question: What is the code of the {name}? Answer: The code of the {name} is"
    return Task("\n\n".join(paragraphs), question, numbers[asked])
