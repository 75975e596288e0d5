"""Whether two contestants wrote the same, and if not, whether their tokens were as good as tied where they part."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.hosts import Host
from benchmarks.peers.huggingface import HuggingFace
from benchmarks.peers.workload import Text


@dataclass(frozen=True, slots=True)
class Sameness:
    """Texts are compared up to their first difference; from there on they are different texts."""

    texts: int
    different: int  # texts that differ somewhere
    share: float  # of all tokens: those before the first difference
    largest_gap: float  # between the target's scores of both tokens, over the first differences; 0 without any


def compare(texts: Sequence[Text], reference: Sequence[Text], models: Host[HuggingFace]) -> Sameness:
    """Compare answers to the same prompts; the models' target is the judge of ties."""
    same, gaps = 0, []
    for text, expected in zip(texts, reference, strict=True):
        at = first_difference(text.answer, expected.answer)
        if at is None:
            same += len(expected.answer)
        else:
            same += at
            until = expected.answer[: at + 1]
            gaps.append(abs(models.call(HuggingFace.gap, text.prompt, until, text.answer[at], text.params)))
    return Sameness(len(texts), len(gaps), same / sum(len(text.answer) for text in reference), max(gaps, default=0.0))


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None)
