"""The inputs of one forward over KV slots: rows go in, one packed tensor comes out."""

from collections.abc import Sequence
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
    if not row_count and not token_count and _are_few_chains(rows):
        return _pack_few_chains(rows, states, [*rest], branches=1 if reach is None else 2)
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
        for index, path in enumerate(row.paths, first):
            trunk, branch = _fold(row.trunk, path)
            position = row.trunk + len(path) - 1
            positions[index] = position
            trunks[index] = trunk
            branches[0][index] = _bits(trunk, branch)
            if reach is not None:
                branches[1][index] = _bits(trunk, branch[reach.first(position) - position - 1 :])
    model_positions[:] = positions
    for row, first in zip(rows, offsets.tolist(), strict=False):
        if row.positions is not None:
            model_positions[first : first + len(row.tokens)] = row.positions
    return PackedInputs(torch.from_numpy(integers), sizes)


def _are_few_chains(rows: Sequence[RowInput]) -> bool:
    if any(row.paths is not None or row.positions is not None for row in rows):
        return False
    return sum([len(row.tokens) for row in rows]) <= _FEW


def _pack_few_chains(
    rows: Sequence[RowInput], states: Sequence[StateRow], rest: list[int], *, branches: int
) -> PackedInputs:
    """Pack few tokens without padding. For so few, lists take a third of the time of arrays."""
    tokens = list(chain.from_iterable([row.tokens for row in rows]))
    columns = list(chain.from_iterable([range(row.start, row.end) for row in rows]))
    parts = (
        *(tokens, columns, [row.slot for row in rows]),
        [0, *accumulate([len(row.tokens) for row in rows])],
        [row.end for row in rows],
        list(chain.from_iterable(states)),
        *(columns, columns, [index for index, row in enumerate(rows) for _ in row.tokens]),
        [column + 1 for column in columns],
        *([[0] * len(tokens)] * branches),
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
