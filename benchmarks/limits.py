"""What is possible at best: speed-ups that follow from measured times and the measured acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.params import SamplingParams
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


@torch.inference_mode()
def agreement(drafter: PreTrainedModel, prompt: list[int], answer: list[int], params: SamplingParams) -> Tensor:
    """[N] bool: where along the target's answer the drafter, given the text before, samples the same token.

    An accepted draft equals the answer, so this one pass tells every draft that the drafter would make there.
    """
    logits = drafter(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    positions = [(params, len(prompt) + i) for i in range(len(answer))]
    return sample(logits, SamplingBatch.build(positions)) == torch.tensor(answer)
