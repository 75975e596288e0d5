"""The inputs of one forward over KV slots: tokens, positions, and the layout that attention over pages reads.

It knows nothing of models or graphs: rows go in, one packed tensor comes out.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from actors.model.forward_input import RowInput
from decoding.sampling.transfer import copy_into, copy_to

MAX_BRANCHES = 64  # columns beyond its trunk among which a token can see; one bit each


class RaggedBatch(NamedTuple):
    """The layout of N tokens of B rows, row after row. A row without tokens is padding."""

    slots: Tensor  # [B] int64, each row's slot
    offsets: Tensor  # [B + 1] int64, the index of each row's first token, and N
    lengths: Tensor  # [B] int64, how many columns a row may read, its new ones included
    columns: Tensor  # [N] int64, the column that each token is written to
    positions: Tensor  # [N] int64, each token's position in its text
    row_of: Tensor  # [N] int64, the index of each token's row
    trunks: Tensor  # [N] int64: a token sees all columns < trunk, which hold the text at these positions
    branches: Tensor  # [N] int64: with bit i it also sees column trunk + i, the next position of its path
    window_branches: Tensor  # [N] int64, for layers with a sliding window; `branches` itself in models without


class PackedInputs(NamedTuple):
    """The inputs of a forward in one tensor, because each copy to a GPU takes the host's time."""

    integers: Tensor  # [3 B + 1 + 6 N] int64, or 7 N with a window
    sizes: Sequence[int]  # of the parts of `integers`

    def copy_to(self, device: torch.device) -> "PackedInputs":
        return PackedInputs(copy_to(device, self.integers), self.sizes)

    def overwrite(self, values: "PackedInputs") -> None:
        """Overwrite with other inputs of the same shapes, which are on the CPU."""
        copy_into(self.integers, values.integers)

    def unpack(self) -> tuple[Tensor, Tensor, RaggedBatch]:
        """Return tokens and positions, [1, N] int64 each, and the layout: views of the packed tensor."""
        tokens, *layout = self.integers.split(self.sizes)
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
) -> PackedInputs:
    """Pack rows on the CPU.

    Args:
        window: the sliding window of the layers that have one, in tokens.
        row_count, token_count: the least B and N. Padding needs at least one row more than given.
        spare_slot: the slot that padding is written to.

    Raises:
        ValueError: a token sees columns more than MAX_BRANCHES beyond the text that it sees.
    """
    tokens, columns, positions, row_of, trunks, branches, windowed = (list[int]() for _ in range(7))
    offsets = [0]
    for index, row in enumerate(rows):
        tokens += row.tokens
        columns += range(row.start, row.end)
        positions += row.positions()
        row_of += [index] * len(row.tokens)
        if row.paths is None:
            trunks += range(row.start + 1, row.end + 1)
            branches += [0] * len(row.tokens)
            windowed += [0] * len(row.tokens)
        else:
            for path in row.paths:
                trunk, rest = _fold(row.trunk, path)
                trunks.append(trunk)
                branches.append(_bits(trunk, rest))
                windowed.append(branches[-1] if window is None else _bits(trunk, rest[-window:]))
        offsets.append(len(tokens))
    padding, padding_rows = max(token_count - len(tokens), 0), max(row_count - len(rows), 0)
    assert padding_rows or not padding
    if padding:  # all of it in the last row; each token sees one column
        for values, value in zip(
            (tokens, columns, positions, row_of, trunks, branches, windowed),
            (0, 0, 0, len(rows) + padding_rows - 1, 1, 0, 0),
            strict=True,
        ):
            values += [value] * padding
    offsets += [offsets[-1]] * padding_rows
    offsets[-1] = len(tokens)
    slots = [*(row.slot for row in rows), *[spare_slot] * padding_rows]
    lengths = [*(row.end for row in rows), *[1] * padding_rows]
    parts = [tokens, slots, offsets, lengths, columns, positions, row_of, trunks, branches]
    if window is not None:
        parts.append(windowed)
    return PackedInputs(
        torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64), [len(part) for part in parts]
    )


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
