"""How many of a student's drafts its teacher would accept, along texts that the teacher wrote. Must not know training.

Given the text, the rates are exact probabilities over the noise of both, so few texts tell much. Tokens beyond the
candidates count as never drafted. What a student computes for a later token of a draft follows from its own drafts, and
accepted ones are the text's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

from training.distillation.lessons import Batch, FeatureSlice, Lessons
from training.distillation.losses import student_logprobs, teacher_probabilities
from training.distillation.student import Student
from training.texts import Chat

LONGEST_DRAFT = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities that at least the first 1, 2, … tokens of a draft are accepted, by kind of verification."""

    temperature: float
    positions: int
    agreement: float
    """share of positions where a draft's first token and the teacher have the same most probable token"""
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
    student: Student,
    chats: Sequence[Chat],
    *,
    tokens: int,
    longest: int,
    features: Sequence[FeatureSlice] | None = None,
) -> list[Rates]:
    """Measure the rates by temperature of the texts. Drafts that a text is too short for don't count.

    Args:
        tokens: of a batch.
        longest: tokens of a text that count, prompt included.
        features: of each chat, if the student reads any.
    """
    student.module.eval()
    measured = []
    for temperature in sorted({chat.temperature for chat in chats}):
        same = [index for index, chat in enumerate(chats) if chat.temperature == temperature]
        lessons = Lessons(
            [chats[index] for index in same],
            student.vocabulary,
            tokens=tokens,
            longest=longest,
            seed=0,
            features=None if features is None else [features[index] for index in same],
        )
        parts = [_measure(student, lessons.batch(indices), temperature) for indices in lessons.schedule(1)]
        agreement, shared, rejection = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        if shared.shape[1]:
            means = shared.mean(-1).tolist(), rejection.mean(-1).tolist()
            measured.append(Rates(temperature, len(agreement), agreement.mean().item(), *means))
    return measured


def _measure(student: Student, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the first tokens agree, [n] float32, and the probabilities that a draft is accepted up to each step.

    The latter, shared noise and rejection, are [LONGEST_DRAFT, m] of the starts that so many tokens follow.
    """
    batch = batch.to(next(student.module.parameters()).device)
    so_far = torch.ones(2, len(batch.candidates))  # [2, N] of the draft that starts there
    accepted = torch.zeros(2, LONGEST_DRAFT, len(batch.candidates))
    agreement, drafted = torch.zeros(0), torch.zeros(len(batch.candidates), dtype=torch.bool)
    for step, (starts, logits) in enumerate(student.drafts(student.module, batch, LONGEST_DRAFT)):
        agrees, *of_kinds = _accepted(batch, starts + step, logits.float(), temperature)
        starts = starts.cpu()
        if step == 0:
            agreement = agrees.cpu()
            drafted[starts] = True
        so_far[:, starts] *= torch.stack(of_kinds).cpu()
        accepted[:, step] = so_far
    long = batch.starts(LONGEST_DRAFT - 1).cpu()
    shared, rejection = accepted[..., long[drafted[long]]]
    return agreement, shared, rejection


def _accepted(batch: Batch, rows: Tensor, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return agreement, and shared-noise and rejection acceptance of the text's tokens, float32, each of `rows`."""
    candidates, known = batch.candidates[rows], batch.known[rows]
    best = logits.argmax(-1)
    agreement = ((best == candidates[:, 0]) & known[:, 0]).float()
    is_drawn = batch.is_drawn[rows] & known  # [n, K] the candidate that the text has
    if temperature == 0:
        same = ((best[:, None] == candidates) & is_drawn).any(-1).float()
        return agreement, same, same
    p = teacher_probabilities(batch.logprobs[rows], temperature)
    q = student_logprobs(logits, candidates, temperature).exp() * known
    return agreement, *given_text(p, q, is_drawn)


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


def _lengths(rates: Sequence[float]) -> list[float]:
    return [1 + accepted for accepted in accumulate(rates, add)]
