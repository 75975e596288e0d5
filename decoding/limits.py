"""What speculation is worth at best: arithmetic on measured times, and on where drafter and target agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.history import History, Position
from decoding.sampling import SamplingBatch, sample


@dataclass(frozen=True, slots=True)
class Limits:
    """Times of one step in seconds, and tokens per target step, of one run at draft length γ."""

    draft_length: int
    plain_step_s: float  # t_1
    verify_step_s: float  # t_verify
    draft_step_s: float  # t_draft, one draft token
    tokens_per_step: float  # E, of a target that always has a full draft

    @property
    def hidden(self) -> float:
        """S*: the speed-up over plain decoding with drafting and transport fully hidden."""
        slowest_s = max(self.verify_step_s, self.draft_length * self.draft_step_s)
        return self.tokens_per_step * self.plain_step_s / slowest_s

    @property
    def alternating(self) -> float:
        """S: the speed-up of drafting and verification strictly in turn, without transport."""
        return self.tokens_per_step * self.plain_step_s / (self.draft_length * self.draft_step_s + self.verify_step_s)


def agreement(drafter_logits: Tensor, history: History, answer: Sequence[int]) -> Tensor:
    """[N] bool: where along the target's answer the drafter, given the text before, samples the same token.

    An accepted draft equals the answer, so one pass along it tells every draft that the drafter would make there.

    Args:
        drafter_logits: [N, V], each after the text before the answer's token of that place.
        history: the text before the answer, and what the target sampled with.
        answer: [N] the target's tokens.
    """
    positions = [Position(history, answer[:i]) for i in range(len(answer))]
    drafted = sample(drafter_logits, SamplingBatch.build(positions, drafter_logits.shape[-1], drafter_logits.device))
    return drafted.cpu() == torch.tensor(answer)


def tokens_per_step(agreements: Sequence[Tensor], draft_length: int) -> float:
    """E: the mean of accepted + 1 where each target step verifies `draft_length` draft tokens.

    Args:
        agreements: [N] bool each, or 0 and 1: where the drafter has the target's token.
        draft_length: γ, shorter than the longest of the agreements.
    """
    tokens = steps = 0
    for agreed in agreements:
        agrees = agreed.bool().tolist()
        place = 0
        while place + draft_length < len(agrees):
            accepted = 0
            while accepted < draft_length and agrees[place + accepted]:
                accepted += 1
            place += accepted + 1
            tokens += accepted + 1
            steps += 1
    return tokens / steps
