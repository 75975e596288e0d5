"""The inputs of one forward over KV slots: rows go in, one packed tensor comes out."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec
import numpy
import torch
from msgspec.structs import replace
from torch import Tensor

from decoding.drafts.draft import Draft
from decoding.sampling.transfer import copy_to
from engine.kernels.attention import MAX_BRANCHES, RaggedBatch, Reach
from engine.kernels.state import StateRow

_FEW = 8  # tokens; with more, arrays are faster


class RowInput(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one row, written to columns start, start + 1, … of the row's slot.

    Without `paths` they continue the text in columns 0 … start - 1. With `paths` they are nodes of a tree below the
    text in columns 0 … trunk - 1. paths[j] lists the columns of token j's ancestors below the text, topmost first,
    and its own column last. Columns from `trunk` to `start` may contain nodes of earlier calls.

    Logits are wanted after the last `wanted` tokens; None: after all.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    trunk: int = 0
    paths: Sequence[Sequence[int]] | None = None
    wanted: int | None = None
    positions: Sequence[int] | None = None  # of the tokens, as the model sees them; None: those in the text
    adapter: int = 0  # the slot of the LoRA weights that its tokens get; 0: none
    adapters: Sequence[int] = ()  # of each token, if they differ
    settled: int | None = None  # how many of its columns hold text for sure, once it has run; None: all of them

    @property
    def logits_count(self) -> int:
        """The number of tokens after which logits are wanted."""
        return len(self.tokens) if self.wanted is None else self.wanted

    @property
    def end(self) -> int:
        """The column after the last new token."""
        return self.start + len(self.tokens)

    @property
    def text_positions(self) -> Sequence[int]:
        """The position of each token in its text."""
        if self.paths is None:
            return range(self.start, self.end)
        return [self.trunk + len(path) - 1 for path in self.paths]


def with_adapter(rows: list[RowInput], adapter: int) -> list[RowInput]:
    """Return a row's inputs with the slot of its LoRA weights; 0: none."""
    return [replace(row, adapter=adapter) for row in rows] if adapter else rows


def token_adapters(rows: Sequence[RowInput]) -> list[int]:
    """Return the slot of the LoRA weights of each token, [N]; [] if none has any."""
    if not any(row.adapter or row.adapters for row in rows):
        return []
    return [slot for row in rows for slot in row.adapters or [row.adapter] * len(row.tokens)]


def draft_input(slot: int, start: int, token: int, draft: Draft) -> RowInput:
    """Return the input of a text's last token, written to column `start`, and K draft tokens: K + 1 in all."""
    tokens = [token, *draft.tokens]
    if draft.is_chain:
        return RowInput(slot, start, tokens, settled=start + 1)
    return tree_input(slot, start, Draft(tokens, [-1, *(parent + 1 for parent in draft.parents)]))


def tree_input(slot: int, start: int, draft: Draft) -> RowInput:
    """Return the input of draft tokens below the text in columns 0 … start - 1."""
    if draft.is_chain:
        return RowInput(slot, start, draft.tokens, settled=start)
    paths: list[list[int]] = []
    for index, parent in enumerate(draft.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), start + index])
    return RowInput(slot, start, draft.tokens, trunk=start, paths=paths)


class PackedInputs(NamedTuple):
    """The inputs of a forward in one tensor, because each copy to a GPU takes the host's time."""

    integers: Tensor  # [3 B + 1 + 7 N] int64, 8 N with a `Reach`, 8 B with states; others may follow
    sizes: Sequence[int]  # of the parts of `integers`

    def copy_to(self, device: torch.device) -> "PackedInputs":
        return PackedInputs(copy_to(device, self.integers), self.sizes)

    def unpack(self) -> tuple[Tensor, Tensor, RaggedBatch]:
        """Return tokens and positions, [1, N] int64 each, and the layout: views of the packed tensor."""
        tokens, positions, *layout = self.integers[: sum(self.sizes)].split(self.sizes)
        if len(layout) < len(RaggedBatch._fields):
            layout.append(layout[-1])
        return tokens[None], positions[None], RaggedBatch._make(layout)


def pack_inputs(
    rows: Sequence[RowInput],
    *,
    reach: Reach | None = None,
    row_count: int = 0,
    token_count: int = 0,
    spare_slot: int = 0,
    states: Sequence[StateRow] = (),
    rest: Sequence[int] = (),
) -> PackedInputs:
    """Pack rows on the CPU.

    Args:
        reach: of the layers that have one.
        row_count, token_count: the least B and N. Padding needs at least one row more than given.
        spare_slot: the slot that padding is written to.
        states: of the rows, if the model carries any.
        rest: other integers for the same copy to the device, which follow.

    Raises:
        ValueError: a token sees columns more than MAX_BRANCHES beyond the text that it sees.
    """
    counts = [len(row.tokens) for row in rows]
    if token_count <= sum(counts) <= _FEW and (row_count <= len(rows) or not states):
        empty = [RowInput(spare_slot, 0, ())] * (row_count - len(rows))  # rows that have no tokens, nor a state
        return _pack_few([*rows, *empty], states, rest, reach)
    starts, slots = [row.start for row in rows], [row.slot for row in rows]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    padding_rows, padding = max(row_count - len(rows), 0), max(token_count - sum(counts), 0)
    assert padding_rows or not padding
    if padding_rows:
        counts += [0] * (padding_rows - 1) + [padding]  # all of it in the last row
        starts += [0] * padding_rows
        slots += [spare_slot] * padding_rows
        lengths += [1] * padding_rows
    total, real = sum(counts), sum(counts) - padding
    state_rows = [*states, *[StateRow(spare_slot, 0)] * padding_rows] if states else []
    state_size = sum(map(len, state_rows))
    per_token = [total] * (5 if reach is None else 6)
    sizes = [total, total, len(counts), len(counts) + 1, len(counts), state_size, *per_token]
    integers = numpy.zeros(sum(sizes) + len(rest), dtype=numpy.int64)
    ends = list(accumulate(sizes))
    integers[ends[-1] :] = rest
    (
        tokens,
        model_positions,
        all_slots,
        offsets,
        all_lengths,
        all_states,
        columns,
        positions,
        row_of,
        trunks,
        *branches,
    ) = (integers[end - size : end] for size, end in zip(sizes, ends, strict=True))
    tokens[:real] = list(chain.from_iterable([row.tokens for row in rows]))
    all_slots[:], all_lengths[:] = slots, lengths
    all_states[:] = list(chain.from_iterable(state_rows))
    offsets[1:] = numpy.cumsum(counts)
    row_of[:] = numpy.repeat(numpy.arange(len(counts)), counts)
    columns[:real] = (numpy.arange(total) + (starts - offsets[:-1])[row_of])[:real]
    positions[:] = columns
    trunks[:] = columns + 1  # a token of padding sees one column, because a softmax over nothing is NaN
    for row, first in zip(rows, offsets.tolist(), strict=False):
        if row.paths is None:
            continue
        nodes = [_place(row.trunk, path, reach) for path in row.paths]
        for part, values in zip((positions, trunks, *branches), zip(*nodes, strict=True), strict=False):
            part[first : first + len(nodes)] = values
    model_positions[:] = positions
    for row, first in zip(rows, offsets.tolist(), strict=False):
        if row.positions is not None:
            model_positions[first : first + len(row.tokens)] = row.positions
    return PackedInputs(torch.from_numpy(integers), sizes)


def _pack_few(
    rows: Sequence[RowInput], states: Sequence[StateRow], rest: Sequence[int], reach: Reach | None
) -> PackedInputs:
    """Pack few tokens, none of them padding. For so few, lists take a third of the time of arrays."""
    columns = [column for row in rows for column in range(row.start, row.end)]
    positions, trunks, *branches = columns, [column + 1 for column in columns], *[[0] * len(columns)] * 2
    if any(row.paths is not None for row in rows):
        nodes = [node for row in rows for node in _places(row, reach)]
        positions, trunks, *branches = map(list, zip(*nodes, strict=True))
    own = [row.text_positions if row.positions is None else row.positions for row in rows]
    parts: tuple[Sequence[int], ...] = (
        *([token for row in rows for token in row.tokens], [position for each in own for position in each]),
        *([row.slot for row in rows], [0, *accumulate([len(row.tokens) for row in rows])], [row.end for row in rows]),
        *([value for state in states for value in state], columns, positions),
        *([index for index, row in enumerate(rows) for _ in row.tokens], trunks),
        *branches[: 1 if reach is None else 2],
    )
    integers = torch.tensor([*chain.from_iterable(parts), *rest], dtype=torch.int64)
    return PackedInputs(integers, [*map(len, parts)])


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


def _places(row: RowInput, reach: Reach | None) -> Iterator[tuple[int, int, int, int]]:
    """Yield what `_place` says of each token."""
    if row.paths is None:
        return ((column, column + 1, 0, 0) for column in range(row.start, row.end))
    return (_place(row.trunk, path, reach) for path in row.paths)


def _place(trunk: int, path: Sequence[int], reach: Reach | None) -> tuple[int, int, int, int]:
    """Return a tree token's position, trunk and branches, and its branches for layers with a reach."""
    position = trunk + len(path) - 1
    trunk, branch = _fold(trunk, path)
    near = branch if reach is None else branch[reach.first(position) - position - 1 :]
    return position, trunk, _bits(trunk, branch), _bits(trunk, near)


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
