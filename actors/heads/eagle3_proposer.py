"""Drafts by an EAGLE-3 head, whose keys and values are one more layer in the target's pages.

Column p holds the pair of the target's hidden state after token p and token p + 1. In a page that texts share, the last
column may be that of another next token: that can only cost acceptance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from actors.heads.eagle3 import Eagle3Head
from actors.heads.proposer import Reading
from actors.heads.sampling import DraftStart, HeadSampler
from actors.heads.spec import HeadsKind
from actors.model.forward_input import RowInput
from actors.model.hidden_states import HiddenStates
from actors.model.ragged_batch import RaggedBatch, pack_inputs
from actors.model.runner import Runner
from decoding.drafts.choice import DraftChoice
from decoding.sampling.transfer import tensor_on

_LENGTH = 8  # tokens of a chain


class Eagle3Proposer:
    """A `HeadProposer`. It drafts chains, and the alternatives to each token of a chain."""

    kind: HeadsKind = "eagle3"
    chained: bool = True
    tree: Sequence[Sequence[int]] | None = None
    length: int = _LENGTH

    def __init__(self, head: Eagle3Head, runner: Runner) -> None:
        """runner: the target's, which keeps the hidden states that the head reads."""
        self._head, self._cache = head, runner.cache
        embedding = head.embed_tokens or runner.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        self._embedding = embedding
        self._device = head.d2t.device
        # after each text's last pair, [slots, H]
        shape = runner.cache.slots, head.hidden_size
        self._states = torch.zeros(shape, dtype=runner.model.dtype, device=self._device)

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Run the head over new tokens, whose columns the target has just written."""
        readings = [reading for reading in readings if reading.following]
        if not readings:
            return
        rows = [RowInput(reading.slot, reading.start, reading.following) for reading in readings]
        chosen = [row for reading in readings for row in reading.layers_rows]
        features = hidden.layers[tensor_on(hidden.layers.device, chosen, torch.int64)].to(self._states)
        self._cache.flush()
        tokens, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        outputs = self._run(self._head.fc(features), tokens, positions, batch)  # [N, H]
        slots = tensor_on(self._device, [reading.slot for reading in readings], torch.int64)
        self._states[slots] = outputs[batch.offsets[1:] - 1]

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Draft a chain for each text. It writes to the columns after the last pair, which the target writes next."""
        if length > 1:
            self._cache.prepare_writes((start.slot, start.length - 1, start.length + length - 2) for start in starts)
        sampler = HeadSampler(starts, length, ranks, self._device)
        rows = [RowInput(start.slot, start.length - 1, [0]) for start in starts]
        _, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        hidden = self._states[batch.slots]  # [B, H]
        for step in range(length):
            tokens = sampler.choose(self._head.logits(hidden))
            if step + 1 < length:
                hidden = self._run(hidden, tokens[None], positions, batch)
                positions, batch = positions + 1, _next_column(batch)
        return sampler.choices()

    def _run(self, hidden: Tensor, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the layer's output, [N, H]. hidden: [N, H]. tokens: [1, N] that follow. positions: [1, N]."""
        embeddings = self._embedding(tokens).to(hidden)
        output: Tensor = self._head(hidden[None], embeddings, positions, ragged_batch=batch, kv_pages=self._cache)
        return output[0]


def _next_column(batch: RaggedBatch) -> RaggedBatch:
    """Return the layout in which each row's only token comes a column later."""
    return batch._replace(
        lengths=batch.lengths + 1, columns=batch.columns + 1, positions=batch.positions + 1, trunks=batch.trunks + 1
    )
