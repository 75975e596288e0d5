"""Reads attention weights while a model runs over pages. It knows nothing of what they are for."""

import torch
from torch import Tensor

from engine.model.attention import reference
from engine.model.ragged_batch import RaggedBatch


class AttentionReader:
    """The largest weight over all layers and heads, of one row's Q tokens to each of its L columns."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.largest = torch.zeros(())  # [Q, L] float32 after the forward

    def read(
        self,
        query: Tensor,  # [N, heads, D] of which the first Q count
        keys: Tensor,  # [pages, kv_heads, D, page_size]
        tables: Tensor,  # [slots + 1, P] int32
        batch: RaggedBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Take in one layer, once its keys are written."""
        row_keys = reference.keys_of_row(keys, tables, int(batch.slots[0]), int(batch.lengths[0]))
        weights = reference.weights(
            query, row_keys, batch, slice(0, self._tokens), scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        largest = weights.flatten(0, 1).amax(dim=0)  # [Q, L]
        self.largest = largest if self.largest.dim() == 0 else torch.maximum(self.largest, largest)
