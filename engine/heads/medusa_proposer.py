"""Drafts by Medusa heads: each text's last hidden state is kept in memory of the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafts.choice import DraftChoice
from decoding.sampling.transfer import tensor_on
from engine.heads.medusa import MedusaHeads
from engine.heads.proposer import Reading
from engine.heads.sampling import DraftStart, HeadSampler
from engine.heads.spec import HeadsKind
from engine.model.hidden_states import HiddenStates
from engine.model.runner import Runner


class MedusaProposer:
    """A `HeadProposer`. All heads see the same state, so any candidate may follow any."""

    kind: HeadsKind = "medusa"
    chained: bool = False

    def __init__(self, heads: MedusaHeads, runner: Runner, *, tree: Sequence[Sequence[int]] | None = None) -> None:
        """runner: the target's, which keeps hidden states. tree: as in `HeadProposer`."""
        self.tree = tree
        self.length = heads.count
        self._heads, self._device = heads, heads.weight.device
        output_layer = runner.model.get_output_embeddings()
        assert output_layer is not None
        self._output_layer = output_layer
        self._states = torch.zeros(
            runner.cache.slots, heads.weight.shape[-1], dtype=heads.weight.dtype, device=self._device
        )

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Keep the hidden state after each text's last token that was run."""
        pairs = [(reading.slot, reading.last_row) for reading in readings if reading.last_row is not None]
        if pairs:
            slots, rows = tensor_on(self._device, pairs, torch.int64).unbind(1)
            self._states[slots] = hidden.last[rows].to(self._states)

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Return what the heads expect after the token that follows the last one that was run."""
        sampler = HeadSampler(starts, length, ranks, self._device)
        for logits in self.logits(starts)[:length]:
            sampler.choose(logits)
        return sampler.choices()

    def logits(self, starts: Sequence[DraftStart]) -> Tensor:
        """Return the heads' logits for some texts, [K, B, V]."""
        slots = tensor_on(self._device, [start.slot for start in starts], torch.int64)
        logits: Tensor = self._heads(self._states[slots], self._output_layer)
        return logits
