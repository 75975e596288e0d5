"""How many of a student's drafts its teacher would accept, along texts that the teacher wrote. Must not know training.

Given the text, the rates are exact probabilities over the noise of both, so few texts tell much. Tokens beyond the
candidates count as never drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.drafter.distillation import counted_logits
from training.drafter.lessons import Lessons
from training.drafter.losses import student_logprobs, teacher_probabilities
from training.drafter.vocabulary import StudentVocabulary
from training.texts import Chat

LONGEST_DRAFT = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities that at least the first 1, 2, … tokens of a draft are accepted, by kind of verification."""

    temperature: float
    positions: int
    agreement: float
    """share of positions where both models have the same most probable token"""
    shared_noise: list[float]
    """both draw with the same Gumbel noise, and the tokens are equal"""
    rejection: list[float]
    """rejection sampling"""

    @property
    def lengths(self) -> dict[str, list[float]]:
        """Tokens committed by a target step, the bonus included, for drafts of 1, 2, … tokens."""
        return {"shared_noise": _lengths(self.shared_noise), "rejection": _lengths(self.rejection)}


@torch.no_grad()
def held_out_rates(
    student: PreTrainedModel, vocabulary: StudentVocabulary, chats: Sequence[Chat], *, tokens: int, longest: int
) -> list[Rates]:
    """Measure the rates by temperature of the texts. Those shorter than the longest draft don't count.

    Args:
        tokens: of a batch.
        longest: tokens of a text that count, prompt included.
    """
    student.eval()
    measured = []
    for temperature in sorted({chat.temperature for chat in chats}):
        same = [chat for chat in chats if chat.temperature == temperature]
        lessons = Lessons(same, vocabulary, tokens=tokens, longest=longest, seed=0)
        rows = [
            row for batch in lessons.schedule(1) for row in _measure(student, vocabulary, lessons, batch, temperature)
        ]
        rows = [row for row in rows if len(row[0]) >= LONGEST_DRAFT]
        if rows:
            agreement, shared, rejection = ([row[part] for row in rows] for part in range(3))
            everywhere = torch.cat(agreement)
            rates = (_by_position(shared), _by_position(rejection))
            measured.append(Rates(temperature, len(everywhere), everywhere.mean().item(), *rates))
    return measured


def _measure(
    student: PreTrainedModel,
    vocabulary: StudentVocabulary,
    lessons: Lessons,
    indices: Sequence[int],
    temperature: float,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each chat agreement, shared-noise and rejection acceptance of the text's tokens, [T] float32 each."""
    batch = lessons.batch(indices).to(student.device)
    logits = counted_logits(student, batch.tokens, batch.counted)[:, : vocabulary.drafted].float()
    best = logits.argmax(-1)
    agreement = (best == batch.candidates[:, 0]) & batch.known[:, 0]
    is_drawn = batch.is_drawn & batch.known  # [N, K] the candidate that the text has
    if temperature == 0:
        shared = rejection = ((best[:, None] == batch.candidates) & is_drawn).any(-1).float()
    else:
        p = teacher_probabilities(batch.logprobs, temperature)
        q = student_logprobs(logits, batch.candidates, temperature).exp() * batch.known
        shared, rejection = given_text(p, q, is_drawn)
    lengths = batch.counted.sum(-1).tolist()
    columns = (agreement.float(), shared, rejection)
    return list(zip(*(column.cpu().split(lengths) for column in columns), strict=True))


def given_text(p: Tensor, q: Tensor, is_drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities that a draft is accepted, given the token that the teacher drew, [N] each.

    With shared Gumbel noise P(student draws x | teacher drew x) is 1 / Σ_j max(p_j, q_j p_x / q_x). Rejection sampling
    accepts x with min(1, q_x / p_x) where the draft is x, which has the same mean as the sum of min(p, q).

    Args:
        p, q: [N, K], of the candidates; what is missing to 1 is taken to be of different tokens
        is_drawn: [N, K] bool, at most one of a row
    """
    tiny = torch.finfo(p.dtype).tiny
    p_drawn, q_drawn = ((each * is_drawn).sum(-1) for each in (p, q))
    is_possible = (q_drawn > 0) & (p_drawn > 0)
    ratio = (q_drawn / p_drawn.clamp_min(tiny)).clamp_min(tiny)
    beyond = (1 - p.sum(-1)).clamp_min(0) + (1 - q.sum(-1)).clamp_min(0) / ratio
    shared = 1 / (torch.maximum(p, q / ratio[:, None]).sum(-1) + beyond).clamp_min(1)
    return shared * is_possible, ratio.clamp_max(1) * is_possible


def _by_position(texts: Sequence[Tensor]) -> list[float]:
    """Return the mean of the product of the first 1, 2, … tokens of a draft, over all its beginnings in all texts."""
    products = [torch.ones(len(text) - LONGEST_DRAFT + 1) for text in texts]
    rates = []
    for position in range(LONGEST_DRAFT):
        for product, text in zip(products, texts, strict=True):
            product *= text[position : position + len(product)]
        rates.append(torch.cat(products).mean().item())
    return rates


def _lengths(rates: Sequence[float]) -> list[float]:
    return [1 + accepted for accepted in accumulate(rates, add)]
