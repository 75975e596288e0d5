"""Compares texts of two contestants: whether they are equal, or differ first at a tie of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.hosts import Host
from benchmarks.peers.huggingface import HuggingFace
from benchmarks.peers.workload import Text


@dataclass(frozen=True, slots=True)
class Sameness:
    """The result of a comparison. Tokens after the first difference of two texts are not compared."""

    texts: int
    different: int  # texts that differ somewhere
    share: float  # share of all tokens that come before a first difference
    largest_gap: float  # largest difference of the target's scores at a first difference; 0 if all texts are equal


def compare_texts(texts: Sequence[Text], reference: Sequence[Text], models: Host[HuggingFace]) -> Sameness:
    """Compare answers to the same prompts. The models' target judges ties."""
    same, gaps = 0, []
    for text, expected in zip(texts, reference, strict=True):
        index = first_difference(text.answer, expected.answer)
        if index is None:
            same += len(expected.answer)
        else:
            same += index
            until = expected.answer[: index + 1]
            gaps.append(abs(models.call(HuggingFace.gap, text.prompt, until, text.answer[index], text.params)))
    return Sameness(len(texts), len(gaps), same / sum(len(text.answer) for text in reference), max(gaps, default=0.0))


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None)
