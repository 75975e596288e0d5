"""How much of what a student drafts its teacher would accept, as divergences to train on and as exact probabilities.

Everything follows from the student's log-probabilities at the teacher's K most probable tokens, so no loss walks
through the vocabulary. Tokens beyond these candidates count as one token that never agrees. Along texts that the
teacher wrote the probabilities are exact over the noise of both, so few texts tell much. What a student computes for a
later token of a draft follows from its own drafts, and accepted ones are the text's.

N positions, K candidates, V vocabulary. p is the teacher, q the student.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from training.distillation.lessons import Batch, FeatureSlice, Lessons, Student
from training.texts import Chat

LossName = Literal["lk", "kl", "reverse_kl", "tv"]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
_LK_DECAY = 3.0
_TINY = 1e-6

Loss = Callable[[Tensor, Tensor], Tensor]  # (log q [N, K], p [N, K]) to the mean over positions, []

LONGEST_DRAFT = 8


def teacher_probabilities(logprobs: Tensor, temperature: float) -> Tensor:
    """Return the teacher's probabilities of its candidates at a temperature above 0, [N, K] float32.

    Below temperature 1 the tokens beyond the candidates count as impossible. logprobs: [N, K] at temperature 1.
    """
    if temperature == 1.0:
        return logprobs.float().exp()
    return (logprobs.float() / temperature).softmax(-1)


def student_logprobs(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Return the student's log-probabilities, [N, K] float32, of the candidates' rows, [N, K] int64. logits: [N, V]."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return scaled.gather(-1, rows) - scaled.logsumexp(-1, keepdim=True)


def acceptance(log_q: Tensor, p: Tensor) -> Tensor:
    """Return the probability that rejection sampling accepts a draft: the sum of min(p, q), [N]."""
    return torch.minimum(log_q.exp(), p).sum(-1)


def kl(log_q: Tensor, p: Tensor) -> Tensor:
    """Return KL(p ∥ q), p scaled to the candidates and weighted with their mass (DistillSpec, arXiv 2310.08461)."""
    mass = p.sum(-1, keepdim=True).clamp_min(_TINY)
    return (torch.xlogy(p, p / mass) - p * log_q).sum(-1).mean()


def reverse_kl(log_q: Tensor, p: Tensor) -> Tensor:
    """Return KL(q ∥ p), with the tokens beyond the candidates as one."""
    q = log_q.exp()
    rest = (1 - q.sum(-1)).clamp_min(_TINY)
    rest_of_teacher = (1 - p.sum(-1)).clamp_min(_TINY)
    inside = (q * (log_q - p.clamp_min(_TINY).log())).sum(-1)
    return (inside + rest * (rest / rest_of_teacher).log()).mean()


def tv(log_q: Tensor, p: Tensor) -> Tensor:
    """Return the total variation, 1 − acceptance. Its gradient is weak while q is far from p."""
    return 1 - acceptance(log_q, p).mean()


def lk(log_q: Tensor, p: Tensor) -> Tensor:
    """Return λ·KL + (1 − λ)·TV with λ = exp(−3 · acceptance): KL first, then TV (LK losses, arXiv 2602.23881)."""
    weight = torch.exp(-_LK_DECAY * acceptance(log_q, p).mean().detach())
    return weight * kl(log_q, p) + (1 - weight) * tv(log_q, p)


LOSSES: Mapping[LossName, Loss] = {"lk": lk, "kl": kl, "reverse_kl": reverse_kl, "tv": tv}


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities that at least the first 1, 2, … tokens of a draft are accepted, by kind of verification."""

    temperature: float
    positions: int
    agreement: float  # share of positions where a draft's first token is the teacher's most probable one
    shared_noise: list[float]  # both draw with the same Gumbel noise, and the tokens are equal
    rejection: list[float]  # rejection sampling

    @property
    def lengths(self) -> dict[str, list[float]]:
        """Tokens committed by a target step, the bonus included, for drafts of 1, 2, … tokens."""
        kinds = {"shared_noise": self.shared_noise, "rejection": self.rejection}
        return {kind: [1 + accepted for accepted in accumulate(rates)] for kind, rates in kinds.items()}


@torch.no_grad()
def held_out_rates(
    student: Student,
    chats: Sequence[Chat],
    *,
    tokens: int,
    longest: int,
    features: Sequence[FeatureSlice] | None = None,
    bfloat16: bool = False,
) -> list[Rates]:
    """Measure the rates by temperature of the texts. Drafts that a text is too short for don't count.

    tokens, longest, features: as in `Lessons`. bfloat16: whether to compute the student in it (autocast).
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
        batches = map(lessons.batch, lessons.schedule(1))
        parts = [_measure(student, batch, temperature, bfloat16=bfloat16) for batch in batches]
        agreement, shared, rejection = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        if shared.shape[1]:
            means = shared.mean(-1).tolist(), rejection.mean(-1).tolist()
            measured.append(Rates(temperature, len(agreement), agreement.mean().item(), *means))
    return measured


def _measure(student: Student, batch: Batch, temperature: float, *, bfloat16: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the first tokens agree, [n] float32, and the probabilities that a draft is accepted up to each step.

    The latter, shared noise and rejection, are [LONGEST_DRAFT, m] of the starts that so many tokens follow.
    """
    batch = batch.to(next(student.module.parameters()).device)
    so_far = torch.ones(2, len(batch.candidates))  # [2, N] of the draft that starts there
    accepted = torch.zeros(2, LONGEST_DRAFT, len(batch.candidates))
    agreement, drafted = torch.zeros(0), torch.zeros(len(batch.candidates), dtype=torch.bool)
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bfloat16):
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

    p, q: [N, K], of the candidates; what is missing to 1 is taken to be of different tokens. is_drawn: [N, K] bool.
    """
    tiny = torch.finfo(p.dtype).tiny
    p_drawn, q_drawn = ((each * is_drawn).sum(-1) for each in (p, q))
    is_possible = (q_drawn > 0) & (p_drawn > 0)
    ratio = (q_drawn / p_drawn.clamp_min(tiny)).clamp_min(tiny)
    beyond = (1 - p.sum(-1)).clamp_min(0) + (1 - q.sum(-1)).clamp_min(0) / ratio
    shared = 1 / (torch.maximum(p, q / ratio[:, None]).sum(-1) + beyond).clamp_min(1)
    return shared * is_possible, ratio.clamp_max(1) * is_possible
