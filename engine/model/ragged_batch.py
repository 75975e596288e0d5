"""The inputs of one forward over KV slots: tokens, positions, and the layout that attention over pages reads.

It knows nothing of models or graphs: rows go in, one packed tensor comes out.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from decoding.sampling.transfer import copy_to
from engine.model.forward_input import RowInput

MAX_BRANCHES = 64  # columns beyond its trunk among which a token can see; one bit each


class RaggedBatch(NamedTuple):
    """The layout of N tokens of B rows, row after row. A row without tokens is padding."""

    slots: Tensor  # [B] int64, each row's slot
    offsets: Tensor  # [B + 1] int64, the index of each row's first token, and N
    lengths: Tensor  # [B] int64, how many columns a row may read, its new ones included
    columns: Tensor  # [N] int64, the column that each token is written to
    positions: Tensor  # [N] int64, each token's position in its text, without the gaps of a shortened prompt
    row_of: Tensor  # [N] int64, the index of each token's row
    trunks: Tensor  # [N] int64: a token sees all columns < trunk, which hold the text at these positions
    branches: Tensor  # [N] int64: with bit i it also sees column trunk + i, the next position of its path
    window_branches: Tensor  # [N] int64, for layers with a sliding window; `branches` itself in models without


class PackedInputs(NamedTuple):
    """The inputs of a forward in one tensor, because each copy to a GPU takes the host's time."""

    integers: Tensor  # [3 B + 1 + 6 N] int64, or 7 N with a window; others may follow
    sizes: Sequence[int]  # of the parts of `integers`

    def copy_to(self, device: torch.device) -> "PackedInputs":
        return PackedInputs(copy_to(device, self.integers), self.sizes)

    def unpack(self) -> tuple[Tensor, Tensor, RaggedBatch]:
        """Return tokens and positions, [1, N] int64 each, and the layout: views of the packed tensor."""
        tokens, *layout = self.integers[: sum(self.sizes)].split(self.sizes)
        if len(layout) < len(RaggedBatch._fields):
            layout.append(layout[-1])
        batch = RaggedBatch._make(layout)
        return tokens[None], batch.positions[None], batch


def pack_inputs(
    rows: Sequence[RowInput],
    *,
    window: int | None = None,
    row_count: int = 0,
    token_count: int = 0,
    spare_slot: int = 0,
    rest: Sequence[int] = (),
) -> PackedInputs:
    """Pack rows on the CPU.

    Args:
        window: the sliding window of the layers that have one, in tokens.
        row_count, token_count: the least B and N. Padding needs at least one row more than given.
        spare_slot: the slot that padding is written to.
        rest: other integers for the same copy to the device, which follow.

    Raises:
        ValueError: a token sees columns more than MAX_BRANCHES beyond the text that it sees.
    """
    counts, starts, slots = [len(row.tokens) for row in rows], [row.start for row in rows], [row.slot for row in rows]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    padding_rows, padding = max(row_count - len(rows), 0), max(token_count - sum(counts), 0)
    assert padding_rows or not padding
    if padding_rows:
        counts += [0] * (padding_rows - 1) + [padding]  # all of it in the last row
        starts += [0] * padding_rows
        slots += [spare_slot] * padding_rows
        lengths += [1] * padding_rows
    total, real = sum(counts), sum(counts) - padding
    sizes = [total, len(counts), len(counts) + 1, len(counts), *[total] * (5 if window is None else 6)]
    integers = numpy.zeros(sum(sizes) + len(rest), dtype=numpy.int64)
    ends = list(accumulate(sizes))
    integers[ends[-1] :] = rest
    tokens, all_slots, offsets, all_lengths, columns, positions, row_of, trunks, *branches = (
        integers[end - size : end] for size, end in zip(sizes, ends, strict=True)
    )
    tokens[:real] = list(chain.from_iterable([row.tokens for row in rows]))
    all_slots[:], all_lengths[:] = slots, lengths
    offsets[1:] = numpy.cumsum(counts)
    row_of[:] = numpy.repeat(numpy.arange(len(counts)), counts)
    columns[:real] = (numpy.arange(total) + (starts - offsets[:-1])[row_of])[:real]
    positions[:] = columns
    trunks[:] = columns + 1  # a token of padding sees one column, because a softmax over nothing is NaN
    for row, first in zip(rows, offsets.tolist(), strict=False):
        if row.paths is None:
            continue
        for index, path in enumerate(row.paths, first):
            trunk, branch = _fold(row.trunk, path)
            positions[index] = row.trunk + len(path) - 1
            trunks[index] = trunk
            branches[0][index] = _bits(trunk, branch)
            if window is not None:
                branches[1][index] = _bits(trunk, branch[-window:])
    return PackedInputs(torch.from_numpy(integers), sizes)


def have_gaps(rows: Sequence[RowInput]) -> bool:
    """Whether a token of the rows may have another position than its column's."""
    return any(row.prompt_positions is not None for row in rows)


def whole_positions(rows: Sequence[RowInput], positions: Tensor) -> Tensor:
    """Return positions in whole texts, [1, N] int64: those for the model, where some prompts are shortened.

    positions: [1, N] int64 on the CPU, in the texts as they are in the cache.
    """
    whole, first = positions.clone(), 0
    for row in rows:
        end = first + len(row.tokens)
        if row.prompt_positions is not None:
            whole[0, first:end] = row.prompt_positions.translate(whole[0, first:end])
        first = end
    return whole


def wanted_tokens(rows: Sequence[RowInput]) -> list[int]:
    """Return the indices of the tokens after which logits are wanted, row after row."""
    wanted: list[int] = []
    end = 0
    for row in rows:
        start, end = end, end + len(row.tokens)
        wanted += range(start if row.wanted is None else end - row.wanted, end)
    return wanted


def padding_row(spare_slot: int) -> RowInput:
    """Return a row of one token of padding."""
    return RowInput(spare_slot, 0, [0])


def _fold(trunk: int, path: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return the trunk that includes the path's first columns if they follow it, and the rest of the path."""
    start = trunk
    for column in path:
        if column != trunk:
            break
        trunk += 1
    return trunk, path[trunk - start :]


def _bits(trunk: int, path: Sequence[int]) -> int:
    """Return a bit for each column of the path, as a signed number."""
    bits = 0
    for column in path:
        bits |= 1 << (column - trunk)
    if bits >> MAX_BRANCHES:
        raise ValueError(f"a tree reaches {max(path) - trunk} columns beyond its text; {MAX_BRANCHES - 1} are allowed")
    return bits - (bits >> (MAX_BRANCHES - 1) << MAX_BRANCHES)
