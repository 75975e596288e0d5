"""The coupled sampler of `sampler.py` in a form that a graph can record: tensors of fixed shapes for B rows.

It samples chains of tokens without the host, so it serves only requests whose processors depend on nothing but logits.
"""

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.sampling.noise import gumbel, noise_key
from decoding.sampling.params import SamplingParams
from decoding.sampling.processors import DISTRIBUTION
from decoding.sampling.shaping import never_needs_shaping

_MIN_BOUND = 64  # lowest bound of a setting; bounds are powers of two, so that few graphs are recorded


def can_chain(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on the tokens before it through the logits alone."""
    return not params.rejects and params.structure is None and never_needs_shaping(params)


class ChainSampler(NamedTuple):
    """The processors of rows that are sampled together. Greedy rows may be among them."""

    # indices in DISTRIBUTION, temperature first, and bounds of settings; empty: all rows are greedy
    stages: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int) -> "ChainSampler":
        """Build a sampler with all processors that any row needs."""
        random = [params for params in rows if not params.greedy]
        stages: list[tuple[int, int]] = []
        for index, processor in enumerate(DISTRIBUTION):
            values = [getattr(params, processor.field) for params in random]
            if values and (index == 0 or any(value != processor.off for value in values)):
                bound = max(int(max(values)), _MIN_BOUND)
                stages.append((index, min(1 << (bound - 1).bit_length(), vocab_size) if processor.bounded else 0))
        return cls(tuple(stages))

    def settings(self, rows: Sequence[SamplingParams], count: int) -> Tensor:
        """Return the settings of each stage and row, [S, count] float64, on the CPU. NaN: off, or no such row."""
        settings = torch.full((len(self.stages), count), nan, dtype=torch.float64)
        for stage, (index, _) in enumerate(self.stages):
            processor = DISTRIBUTION[index]
            values = [nan if params.greedy else float(getattr(params, processor.field)) for params in rows]
            off = nan if index == 0 else processor.off  # a row is random if its temperature is not NaN
            settings[stage, : len(rows)] = torch.tensor([nan if value == off else value for value in values])
        return settings

    def keys(self, rows: Sequence[tuple[SamplingParams, int]], length: int, count: int) -> Tensor:
        """Return noise keys, [length, count, 2] int32, on the CPU. rows: parameters, and the first token's position."""
        keys = torch.zeros(length, count, 2, dtype=torch.int32)
        if self.stages:
            row_keys = [[noise_key(params.seed, first + step) for params, first in rows] for step in range(length)]
            keys[:, : len(rows)] = torch.tensor(row_keys, dtype=torch.int32)
        return keys

    def scores(self, logits: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
        """Return scores whose maxima are the tokens, [B, V] float32.

        logits: [B, V]; settings: [S, B]; keys: [B, 2] of one position.
        """
        scores = logits.float()
        if not self.stages:
            return scores
        for (index, bound), values in zip(self.stages, settings.unbind(), strict=True):
            processor = DISTRIBUTION[index]
            changed = processor.bound(bound)(scores, values.nan_to_num(1.0).to(processor.dtype))  # 1 is valid for all
            scores = torch.where(values.isnan()[:, None], scores, changed)
        noisy = gumbel(keys, logits.shape[-1]).add_(scores)
        return torch.where(settings[0].isnan()[:, None], scores, noisy)
