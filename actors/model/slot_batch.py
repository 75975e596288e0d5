"""The inputs of one forward over KV slots: tokens, positions, and the layout that attention over slots reads.

It knows nothing of models or graphs: rows go in, a few packed tensors come out.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.forward_input import RowInput, visible_columns
from decoding.sampling.transfer import copy_into, copy_to


class SlotBatch(NamedTuple):
    """The layout of N tokens: B rows of at most Q tokens, each of which reads the first L columns of its slot."""

    slots: Tensor  # [N] int64, each token's slot
    columns: Tensor  # [N] int64, the column that each token is written to
    rows: Tensor  # [B] int64, each row's slot
    offsets: Tensor  # [B + 1] int64, the index of each row's first token, and N
    ends: Tensor  # [B] int64, how many columns each row reads, at most L
    flat: Tensor  # [N] int64, row * Q + the token's index in its row
    mask: Tensor  # [B, Q, L] in the model's dtype, added to the scores: 0 or -inf
    windowed: Tensor  # [B, Q, L], for layers with a sliding window; `mask` itself in models without


class PackedInputs(NamedTuple):
    """The inputs of a forward in few tensors, because each copy to a GPU takes the host's time."""

    integers: Tensor  # [5 N + 3 B + 1] int64: all inputs but the masks
    masks: Sequence[Tensor]  # `mask`, and `windowed` if it differs
    sizes: Sequence[int]  # of the parts of `integers`

    def copy_to(self, device: torch.device) -> "PackedInputs":
        return PackedInputs(copy_to(device, self.integers), [copy_to(device, mask) for mask in self.masks], self.sizes)

    def overwrite(self, values: "PackedInputs") -> None:
        """Overwrite with other inputs of the same shapes, which are on the CPU."""
        for buffer, tensor in zip((self.integers, *self.masks), (values.integers, *values.masks), strict=True):
            copy_into(buffer, tensor)

    def unpack(self) -> tuple[Tensor, Tensor, SlotBatch]:
        """Return tokens and positions, [1, N] int64 each, and the layout: views of the packed tensors."""
        tokens, positions, *layout = self.integers.split(self.sizes)
        return tokens[None], positions[None], SlotBatch._make([*layout, self.masks[0], self.masks[-1]])


def pack_inputs(
    rows: Sequence[RowInput],
    columns: int,
    *,
    dtype: torch.dtype,
    window: int | None = None,
    width: int = 0,
    spare_slot: int | None = None,
) -> PackedInputs:
    """Pack rows on the CPU.

    Args:
        columns: L.
        dtype: the model's.
        window: the sliding window of the layers that have one, in tokens.
        width: the least Q; a longer row raises it.
        spare_slot: the slot that padding is written to. None: rows are not padded to Q tokens.
    """
    width = max(width, max(len(row.tokens) for row in rows))
    tokens, positions, slots, written, flat = (list[int]() for _ in range(5))  # written: columns
    offsets = [0]
    for row_index, row in enumerate(rows):
        tokens += row.tokens
        positions += row.positions()
        slots += [row.slot] * len(row.tokens)
        written += range(row.start, row.end)
        if spare_slot is not None and len(row.tokens) < width:
            padding = range(len(row.tokens), width)
            tokens += [0] * len(padding)
            positions += [0] * len(padding)
            slots += [spare_slot] * len(padding)
            written += padding
        flat += range(row_index * width, row_index * width + len(tokens) - offsets[-1])
        offsets.append(len(tokens))
    parts = tokens, positions, slots, written, [row.slot for row in rows], offsets, [row.end for row in rows], flat
    integers = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
    windows = [None] if window is None else [None, window]
    masks = [_mask(visible_columns(rows, width, columns, window), dtype) for window in windows]
    return PackedInputs(integers, masks, [len(part) for part in parts])


def padding_row(spare_slot: int, width: int) -> RowInput:
    """Return a row of padding. It sees columns of the spare slot, because a softmax over nothing is NaN."""
    return RowInput(spare_slot, 0, [0] * width)


def _mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(visible.bitwise_not_(), -math.inf)
