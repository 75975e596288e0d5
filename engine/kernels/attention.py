"""Attention over pages: what it takes, and the reference in plain torch, which runs where no kernel does.

All sums are float32.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

MAX_BRANCHES = 64  # columns beyond its trunk among which a token can see; one bit each
_CHUNK = 128  # tokens whose scores are in memory at a time


Position = TypeVar("Position", int, Tensor)


class Reach(NamedTuple):
    """How far back the tokens of a layer see: the last `size` positions, or those of their own chunk."""

    size: int
    in_chunks: bool = False  # chunks begin at the multiples of `size` (Llama 4)

    def first(self, position: Position) -> Position:
        """Return the first position that a token sees, which may be negative."""
        return position - (position % self.size if self.in_chunks else self.size - 1)


class RaggedBatch(NamedTuple):
    """The layout of N tokens of B rows, row after row. A row without tokens is padding."""

    slots: Tensor  # [B] int64, each row's slot
    offsets: Tensor  # [B + 1] int64, the index of each row's first token, and N
    lengths: Tensor  # [B] int64, how many columns a row may read, its new ones included
    states: Tensor  # [5 B] int64, each row's `StateRow`; [0]: the model carries no state
    columns: Tensor  # [N] int64, the column that each token is written to
    positions: Tensor  # [N] int64, each token's position in its text, without the gaps of a shortened prompt
    row_of: Tensor  # [N] int64, the index of each token's row
    trunks: Tensor  # [N] int64: a token sees all columns < trunk, which hold the text at these positions
    branches: Tensor  # [N] int64: with bit i it also sees column trunk + i, the next position of its path
    near_branches: Tensor  # [N] int64, for layers with a `Reach`; `branches` itself in models without


class AttentionArgs(NamedTuple):
    """What attention of one layer computes with, on any device."""

    query: Tensor  # [N, heads, D]
    key: Tensor  # [N, kv_heads, D]
    value: Tensor  # [N, kv_heads, Dv]
    keys: Tensor  # [pages, kv_heads, D, page_size], of the layer
    values: Tensor | None  # [pages, kv_heads, page_size, Dv]; None: a value is the beginning of its key
    tables: Tensor  # [slots + 1, P] int32
    batch: RaggedBatch
    scale: float
    reach: Reach | None = None  # None: a token sees all text before it
    softcap: float | None = None  # bounds scores (Gemma 2, arXiv 2408.00118)
    # [heads] a score per head that takes part in the softmax and has no value (GPT-OSS; Xiao et al., arXiv 2309.17453)
    sinks: Tensor | None = None

    @property
    def value_size(self) -> int:
        """Dv."""
        return self.value.shape[-1]

    @property
    def stored(self) -> Sequence[Tensor]:
        """The new keys and values that are written to pages."""
        return (self.key,) if self.values is None else (self.key, self.value)

    @property
    def branches(self) -> Tensor:
        """[N] int64, the bits of the columns beyond its trunk that a token sees in this layer."""
        return self.batch.branches if self.reach is None else self.batch.near_branches


def attend(args: AttentionArgs) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, Dv]."""
    write(args)
    query, batch = args.query, args.batch
    slots, lengths, offsets = (part.tolist() for part in (batch.slots, batch.lengths, batch.offsets))
    output = query.new_empty(*query.shape[:2], args.value_size)
    for slot, length, first, end in zip(slots, lengths, offsets, offsets[1:], strict=False):
        row_keys = _row_keys(args, slot, length)
        row_values = _row_values(args, slot, length, row_keys)
        for start in range(first, end, _CHUNK):
            tokens = slice(start, min(start + _CHUNK, end))
            attended = _weights(args, row_keys, tokens) @ row_values  # [kv_heads, group, Q, Dv]
            output[tokens] = attended.flatten(0, 1).transpose(0, 1).to(output.dtype)
    return output


def row_weights(args: AttentionArgs, count: int) -> Tensor:
    """Return how much the first Q tokens attend to the first row's columns, [kv_heads, group, Q, L] float32.

    The row's keys must be written. count: Q.
    """
    row_keys = _row_keys(args, int(args.batch.slots[0]), int(args.batch.lengths[0]))
    return _weights(args, row_keys, slice(0, count))


def write(args: AttentionArgs) -> None:
    """Write the new keys and values to the pages of their columns."""
    batch, page_size = args.batch, args.keys.shape[-1]
    pages = args.tables[batch.slots[batch.row_of], batch.columns // page_size].long()
    offsets = batch.columns % page_size
    args.keys[pages, :, :, offsets] = args.key.to(args.keys.dtype)
    if args.values is not None:
        args.values[pages, :, offsets] = args.value.to(args.values.dtype)


def visible(args: AttentionArgs, tokens: slice, length: int) -> Tensor:
    """Return which of the row's first L columns each token sees: [Q, L] bool."""
    trunks, positions = args.batch.trunks[tokens, None], args.batch.positions[tokens, None]
    columns = torch.arange(length, device=trunks.device)
    text = columns < trunks
    if args.reach is not None:
        text &= columns >= args.reach.first(positions)
    beyond = columns - trunks
    bits = (args.branches[tokens, None] >> beyond.clamp(0, MAX_BRANCHES - 1)) & 1
    return text | ((beyond >= 0) & (beyond < MAX_BRANCHES) & (bits == 1))


def _pages(args: AttentionArgs, slot: int, length: int) -> Tensor:
    """Return the pages of a slot's first columns, [n] int64."""
    return args.tables[slot, : -(-length // args.keys.shape[-1])].long()


def _row_keys(args: AttentionArgs, slot: int, length: int) -> Tensor:
    """Return the keys in a slot's first L columns, [kv_heads, 1, D, L] float32."""
    return args.keys[_pages(args, slot, length)].float().permute(1, 2, 0, 3).flatten(2)[:, None, :, :length]


def _row_values(args: AttentionArgs, slot: int, length: int, row_keys: Tensor) -> Tensor:
    """Return the values in a slot's first L columns, [kv_heads, 1, L, Dv] float32. row_keys: [kv_heads, 1, D, L]."""
    if args.values is None:
        return row_keys[:, :, : args.value_size].transpose(2, 3)
    values = args.values[_pages(args, slot, length)].float().transpose(0, 1)
    return values.flatten(1, 2)[:, None, :length]


def _weights(args: AttentionArgs, row_keys: Tensor, tokens: slice) -> Tensor:
    """Return how much Q tokens of a row attend to its columns, [kv_heads, group, Q, L] float32.

    row_keys: [kv_heads, 1, D, L] float32.
    """
    grouped = args.query[tokens].float().unflatten(1, (row_keys.shape[0], -1)).permute(1, 2, 0, 3)  # [kv, group, Q, D]
    scores = grouped @ row_keys * args.scale
    if args.softcap is not None:
        scores = (scores / args.softcap).tanh() * args.softcap
    scores.masked_fill_(~visible(args, tokens, row_keys.shape[-1]), -torch.inf)
    return _softmax(scores, args.sinks)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of columns, [kv_heads, group, Q, L]; with sinks they sum up to less than 1."""
    if sinks is None:
        return scores.softmax(dim=-1)
    kv_heads, group, count, _ = scores.shape
    extra = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, count, -1)
    return torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
