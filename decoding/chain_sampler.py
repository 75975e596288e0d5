"""The coupled sampler in a form that can be recorded: B rows, whatever their settings, in tensors of fixed shapes.

For chains of tokens of which each is sampled before the host sees the one before it. So it serves only requests whose
processors look at nothing but logits. The scores are those of decoding/sampling.py, whose rules are explained there.
"""

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.noise import gumbel, noise_key
from decoding.params import SamplingParams
from decoding.processors import DISTRIBUTION
from decoding.shaping import is_never_shaped

_LEAST_BOUND = 64  # of settings; bounds are powers of two, so that few calls need to be recorded


def can_chain(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on no token before it, other than through the logits."""
    return not params.rejects and params.structure is None and is_never_shaped(params)


class ChainSampler(NamedTuple):
    """What rows that are sampled together have in common. Greedy ones may be among them."""

    stages: tuple[tuple[int, int], ...]  # places in DISTRIBUTION, temperature first, and bounds of settings; (): greedy

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int) -> "ChainSampler":
        """With all processors that any row needs."""
        random = [params for params in rows if not params.greedy]
        stages: list[tuple[int, int]] = []
        for place, processor in enumerate(DISTRIBUTION):
            values = [getattr(params, processor.field) for params in random]
            if values and (place == 0 or any(value != processor.off for value in values)):
                most = max(int(max(values)), _LEAST_BOUND)
                stages.append((place, min(1 << (most - 1).bit_length(), vocab_size) if processor.bounded else 0))
        return cls(tuple(stages))

    def settings(self, rows: Sequence[SamplingParams], count: int) -> Tensor:
        """[S, count] float64 of each stage and row, on the CPU. NaN: off, as all are in the places after the rows."""
        settings = torch.full((len(self.stages), count), nan, dtype=torch.float64)
        for stage, (place, _) in enumerate(self.stages):
            processor = DISTRIBUTION[place]
            values = [nan if params.greedy else float(getattr(params, processor.field)) for params in rows]
            off = nan if place == 0 else processor.off  # which rows are random is seen from their temperatures
            settings[stage, : len(rows)] = torch.tensor([nan if value == off else value for value in values])
        return settings

    def keys(self, rows: Sequence[tuple[SamplingParams, int]], length: int, count: int) -> Tensor:
        """[length, count, 2] int32 noise keys, on the CPU. rows: parameters, and where in the text the tokens begin."""
        keys = torch.zeros(length, count, 2, dtype=torch.int32)
        if self.stages:
            found = [[noise_key(params.seed, first + step) for params, first in rows] for step in range(length)]
            keys[:, : len(rows)] = torch.tensor(found, dtype=torch.int32)
        return keys

    def scores(self, logits: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
        """[B, V] float32; their maxima are the tokens.

        logits: [B, V]; settings: [S, B]; keys: [B, 2], those of one position.
        """
        scores = logits.float()
        if not self.stages:
            return scores
        for (place, most), values in zip(self.stages, settings.unbind(), strict=True):
            processor = DISTRIBUTION[place]
            changed = processor.bound(most)(scores, values.nan_to_num(1.0).to(processor.dtype))  # 1 suits all of them
            scores = torch.where(values.isnan()[:, None], scores, changed)
        noisy = gumbel(keys, logits.shape[-1]).add_(scores)
        return torch.where(settings[0].isnan()[:, None], scores, noisy)
