"""Runs any decoder-only Hugging Face causal LM over KV slots, on ragged batches, through the model's own `forward`.

It knows nothing of requests, drafts or sampling: rows of token ids go in at given positions, logits come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.slots import SlotCache, SlotWindow, select_rows

_PAD = 0


@dataclass(frozen=True, slots=True)
class RowInput:
    """New tokens of one row: they are written to columns start, start + 1, … of the row's slot.

    Without `paths` they continue the text in columns 0 … start - 1, each token the one before it. With `paths` they are
    nodes of a tree below the text in columns 0 … trunk - 1: paths[j] lists the columns of token j's ancestors below the
    text, topmost first, and its own column last. Columns in between may hold nodes of earlier calls.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    trunk: int = 0
    paths: Sequence[Sequence[int]] | None = None


class Runner:
    """A model with a cache of `slots` rows, each of `max_length` tokens."""

    def __init__(self, model: PreTrainedModel, *, slots: int, max_length: int, max_query: int) -> None:
        """max_query: the most tokens that one call brings per row, Q; padding may write that far past a row's end."""
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        text_config = model.config.get_text_config()
        self._takes_boolean_mask = text_config._attn_implementation == "sdpa"
        self.vocab_size = int(text_config.vocab_size)
        self.max_length = max_length
        self.max_query = max_query
        self.cache = SlotCache(layers=text_config.num_hidden_layers, slots=slots, capacity=max_length + max_query)

    @torch.inference_mode()
    def forward(self, rows: Sequence[RowInput], *, last_only: bool = False) -> Tensor:
        """One batched forward over ragged rows, padded on the right to the longest, Q.

        A row's query token j attends to positions 0 … start + j of its slot, which earlier calls (or this one) wrote.

        Raises:
            ValueError: a query, or the padding that others need, reaches beyond its slot.

        Returns:
            [B, Q, V] logits, meaningless where a row is padded; with `last_only` [B, V], after each row's last token.
        """
        lengths = [len(row.tokens) for row in rows]
        width = max(lengths)
        padded = [[*row.tokens, *[_PAD] * (width - len(row.tokens))] for row in rows]
        tokens = torch.tensor(padded, dtype=torch.int64, device=self.device)  # [B, Q]
        starts = torch.tensor([row.start for row in rows], dtype=torch.int64, device=self.device)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=self.device)
        columns = starts[:, None] + torch.arange(width, device=self.device)  # [B, Q]
        kv_length = max(row.start for row in rows) + width
        if kv_length > self.cache.capacity:
            raise ValueError(f"the batch writes {kv_length} positions, but a slot has {self.cache.capacity}")
        written = (slots[:, None] * self.cache.capacity + columns).flatten()
        window = SlotWindow(select_rows([row.slot for row in rows], self.device), written, kv_length)
        self.cache.look_at(window)
        visible = torch.arange(kv_length, device=self.device) <= columns[:, :, None]  # [B, Q, kv_length]
        positions = columns.clamp(max=self.max_length - 1)  # padding may lie beyond what the model knows
        for index, row in enumerate(rows):
            if row.paths is not None:
                _place_tree(row, positions[index], visible[index])
        same_end = min(lengths) == width
        logits: Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(visible[:, None]),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only and same_end else 0,
        ).logits
        if not last_only:
            return logits
        if same_end:
            return logits[:, -1]
        ends = torch.tensor(lengths, device=self.device) - 1
        return logits[torch.arange(len(rows), device=self.device), ends]

    def keep(self, slot: int, trunk: int, path: Sequence[int]) -> None:
        """Make the tree nodes in the columns of `path` the text that follows column trunk - 1."""
        if list(path) != list(range(trunk, trunk + len(path))):
            self.cache.move(slot, path, trunk)

    def _mask(self, visible: Tensor) -> Tensor:
        """What the attention implementation takes: only SDPA knows boolean masks, others add masks to scores."""
        if self._takes_boolean_mask:
            return visible
        return torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
            ~visible, torch.finfo(self.model.dtype).min
        )

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether there are tokens, all of them in the model's vocabulary, and room for one more in a slot."""
        return 0 < len(tokens) < self.max_length and min(tokens) >= 0 and max(tokens) < self.vocab_size


def _place_tree(row: RowInput, positions: Tensor, visible: Tensor) -> None:
    """Set a tree's positions, [Q], and what its tokens see, [Q, kv_length]."""
    assert row.paths is not None
    visible[: len(row.paths), row.trunk :] = False
    for j, path in enumerate(row.paths):
        visible[j, path] = True
        positions[j] = row.trunk + len(path) - 1
