"""Divergences of a student from its teacher at the teacher's most probable tokens. Must not know about models.

Everything follows from the student's log-probabilities at K candidates, so no loss walks through the vocabulary.
Tokens beyond the candidates count as one token that never agrees.

N positions, K candidates, V vocabulary. p is the teacher, q the student.
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

LossName = Literal["lk", "kl", "reverse_kl", "tv"]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
_LK_DECAY = 3.0
_TINY = 1e-6

Loss = Callable[[Tensor, Tensor], Tensor]
"""(log q [N, K], p [N, K]) to the mean over positions, []"""


def teacher_probabilities(logprobs: Tensor, temperature: float) -> Tensor:
    """Return the teacher's probabilities of its candidates at a temperature above 0, [N, K] float32.

    Below temperature 1 the tokens beyond the candidates count as impossible.

    Args:
        logprobs: [N, K] at temperature 1
    """
    if temperature == 1.0:
        return logprobs.float().exp()
    return (logprobs.float() / temperature).softmax(-1)


def student_logprobs(logits: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Return the student's log-probabilities of the candidates, [N, K] float32.

    Args:
        logits: [N, V]
        rows: [N, K] int64, the candidates' rows in the student's vocabulary
    """
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
