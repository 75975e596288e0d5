"""The layout of one batch over KV slots, as every attention over slots takes it."""

from typing import NamedTuple

from torch import Tensor


class SlotBatch(NamedTuple):
    """Where the N tokens of one call stand: B rows of at most Q tokens each, and the first L columns of their slots."""

    slots: Tensor  # [N] int64, of every token
    columns: Tensor  # [N] int64, where every token is written
    rows: Tensor  # [B] int64, slots
    offsets: Tensor  # [B + 1] int64, where each row's tokens begin among all
    ends: Tensor  # [B] int64, how many columns each row reads, at most L
    flat: Tensor  # [N] int64, row * Q + index of every token in its row
    mask: Tensor  # [B, Q, L] in the model's dtype, added to the scores: 0 or -inf
    windowed: Tensor  # [B, Q, L], the same for the layers with a sliding window; `mask` where there are none
