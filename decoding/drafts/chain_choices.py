"""The tokens of chains of drafts, chosen one after the other in memory of the device, so that a graph can record it."""

from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafts.choice import DraftChoice
from decoding.sampling.batch import COLUMNS, SamplingBatch
from decoding.sampling.processors import COMMON
from decoding.sampling.sampler import rank


class ChainChoices(NamedTuple):
    """The settings and choices of B rows' chains of up to C tokens."""

    step: Tensor  # [1] int64, the number of the next token
    settings: Tensor  # [C, B, 6] float64, see `SamplingBatch`
    choices: Tensor  # [C, B, 2, ranks] float64: tokens, best first, and their scores

    @classmethod
    def from_packed(cls, step: Tensor, settings: Tensor, count: int, ranks: int) -> "ChainChoices":
        """Return the choices of `count` rows. settings: [C · B · 6] int64, the bits of the settings."""
        settings = settings.view(torch.float64).view(-1, count, len(COLUMNS))
        choices = torch.empty(len(settings), count, 2, ranks, dtype=torch.float64, device=step.device)
        return cls(step, settings, choices)

    def choose(
        self, logits: Tensor, used: frozenset[str] = frozenset(COMMON), token_ids: Tensor | None = None
    ) -> Tensor:
        """Choose each row's next token, [B] int64, and store it at `step`, which the caller advances.

        logits: [B, V]. used: as in `SamplingBatch`. token_ids: as in `rank`.
        """
        settings = self.settings.index_select(0, self.step)[0]
        tokens, scores = rank(logits, SamplingBatch(settings, used), self.choices.shape[-1], token_ids)
        stored = torch.stack([tokens.double(), scores.double()], dim=1)  # both fit exactly
        self.choices.index_copy_(0, self.step, stored[None])
        return tokens[:, 0]

    def read(self, rows: int, length: int) -> list[list[DraftChoice]]:
        """Return the first `length` choices of the first rows. The host waits for the device."""
        choices = self.choices[:length].tolist()
        return [[DraftChoice.ranked(*choices[step][row]) for step in range(length)] for row in range(rows)]
