"""Upper bounds of the speed-up by speculation, from step times and the agreement of drafter and target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Seconds per step and tokens per target step of one run at draft length γ."""

    draft_length: int
    plain_step_s: float  # t_1
    verify_step_s: float  # t_verify
    draft_step_s: float  # t_draft, one draft token
    tokens_per_step: float  # E, given that the target always has a full draft

    @property
    def hidden(self) -> float:
        """S*: the speed-up over plain decoding with drafting and transport fully hidden.

        At most E, as long as verification takes no less time than a plain step.
        """
        slowest_s = max(self.verify_step_s, self.draft_length * self.draft_step_s)
        return self.tokens_per_step * self.plain_step_s / slowest_s

    @property
    def alternating(self) -> float:
        """S: the speed-up of alternating drafting and verification, without transport."""
        return self.tokens_per_step * self.plain_step_s / (self.draft_length * self.draft_step_s + self.verify_step_s)


def agreement(drafter_logits: Tensor, history: History, answer: Sequence[int]) -> Tensor:
    """Return for each token of the target's answer whether the drafter samples the same, [N] bool.

    An accepted draft equals the answer, so one pass over the answer covers every draft that would be accepted.

    Args:
        drafter_logits: [N, V], after the text before each token of the answer.
        history: the text before the answer, and the sampling parameters.
        answer: [N] the target's tokens.
    """
    positions = [Position(history, answer[:i]) for i in range(len(answer))]
    drafted = sample(drafter_logits, SamplingBatch.build(positions, drafter_logits.shape[-1], drafter_logits.device))
    return drafted.cpu() == torch.tensor(answer)


def accepted_lengths(agrees: Tensor) -> Tensor:
    """Return how many tokens of a draft would be accepted from each token on, [N] int64.

    agrees: [N] bool, or 0 and 1: whether the drafter samples the target's token.
    """
    lengths, length = [], 0
    for agreed in reversed(agrees.bool().tolist()):
        length = (length + 1) * agreed
        lengths.append(length)
    return torch.tensor(lengths[::-1], dtype=torch.int64)


def tokens_per_step(accepted: Sequence[Tensor], draft_length: int) -> float:
    """Return E, the mean of accepted + 1 if each target step verifies `draft_length` draft tokens.

    Args:
        accepted: for each answer [N] as `accepted_lengths` returns it.
        draft_length: γ, shorter than the longest answer.
    """
    tokens = steps = 0
    for answer in accepted:
        lengths, position = answer.tolist(), 0
        while position + draft_length < len(lengths):
            committed = min(lengths[position], draft_length) + 1
            position += committed
            tokens += committed
            steps += 1
    return tokens / steps
