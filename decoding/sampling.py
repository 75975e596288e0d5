"""The coupled sampler: argmax(processed logits + shared Gumbel noise), an exact sample of their softmax.

Greedy decoding is the same rule without noise. Adding the same constant to all logits changes nothing, so they need
no normalisation. Works on a flat batch of N positions, whichever rows they belong to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import processors
from decoding.noise import gumbel, noise_key
from decoding.params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Settings of the S of N positions that are not greedy, and which processors have any work to do."""

    sampled: Tensor  # [S] int64, their indices in 0…N−1
    temperature: Tensor  # [S] float32
    top_k: Tensor  # [S] int64, 0 is off
    top_p: Tensor  # [S] float64, 1 is off
    keys: Tensor  # [S, 2] int32, noise keys
    uses_top_k: bool
    uses_top_p: bool

    @classmethod
    def build(
        cls, positions: Sequence[tuple[SamplingParams, int]], device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """From (parameters, absolute position of the token to sample), one per position, to tensors on `device`."""
        sampled = [i for i, (params, _) in enumerate(positions) if not params.greedy]
        chosen = [positions[i] for i in sampled]
        keys = [noise_key(params.seed, position) for params, position in chosen]
        return cls(
            sampled=torch.tensor(sampled, dtype=torch.int64, device=device),
            temperature=torch.tensor([p.temperature for p, _ in chosen], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p, _ in chosen], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p, _ in chosen], dtype=torch.float64, device=device),
            keys=torch.tensor(keys, dtype=torch.int32, device=device).reshape(-1, 2),
            uses_top_k=any(p.top_k > 0 for p, _ in chosen),
            uses_top_p=any(p.top_p < 1 for p, _ in chosen),
        )


def process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The target distribution's logits, [S, V] float32, of the positions that are not greedy; logits: [N, V]."""
    chosen = logits if len(batch.sampled) == len(logits) else logits[batch.sampled]
    processed = processors.temperature(chosen.float(), batch.temperature)
    if batch.uses_top_k:
        processed = processors.top_k(processed, batch.top_k)
    if batch.uses_top_p:
        processed = processors.top_p(processed, batch.top_p)
    return processed


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token per position. logits: [N, V] of any float type; returns [N] int64."""
    tokens = logits.argmax(dim=-1)
    if len(batch.sampled):
        tokens[batch.sampled] = _noisy(logits, batch).argmax(dim=-1)
    return tokens


def rank(logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens by the scores whose maximum `sample` takes, best first: a draft and its alternatives.

    logits: [N, V] of any float type, V ≥ count. Returns [N, count] int64 tokens and [N, count] float32 scores, −∞ for
    what the parameters rule out.
    """
    scores = logits.float()
    if len(batch.sampled) == len(logits):
        scores = _noisy(logits, batch)
    elif len(batch.sampled):
        scores = scores.index_copy(0, batch.sampled, _noisy(logits, batch))
    best = scores.topk(count, dim=-1)
    return best.indices, best.values


def _noisy(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[S, V] float32, the processed logits and the noise; logits: [N, V]."""
    return process(logits, batch).add_(gumbel(batch.keys, logits.shape[-1]))
