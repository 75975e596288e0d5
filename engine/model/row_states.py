"""Which columns the state of each slot stands for, and snapshots of states at page boundaries of texts.

A snapshot lets a text that begins alike go on from there. They are kept at the end of each prompt and where a prompt
leaves one that is known, as many as there are cells for; the one that was used longest ago goes first. Drafts change
nothing of that.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.kernels.state import RING, StateRow
from engine.model.ragged_batch import RowInput

MAX_UNSETTLED = RING // 2  # columns of a row that may turn out not to be text
_LOST = sys.maxsize


class RowStates:
    """States of slots 0 … slots - 1, a spare one for padding, and cells for snapshots after these."""

    def __init__(self, slots: int, snapshots: int, page_size: int) -> None:
        self.slots, self.cells, self._page_size = slots, slots + 1 + snapshots, page_size
        self._held = [0] * (slots + 1)  # by slot: how many columns' effects its state holds
        self._sources = list(range(slots + 1))  # the cell that it is read from next
        self._wanted: list[list[tuple[int, bytes]]] = [[] for _ in range(slots + 1)]  # snapshots: column, key
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # cells by the key of the last page, oldest use first
        self._free = list(range(slots + 1, self.cells))

    def plan(self, rows: Sequence[RowInput]) -> list[StateRow]:
        """Return where each row's state is, and where it goes in the forward that runs the rows next.

        Raises:
            ValueError: a row goes back before its state, or leaves more columns unsettled than are remembered.
        """
        busy = set(self._sources)  # this forward reads them, so it may not write snapshots there
        return [self._plan(row, busy) for row in rows]

    def _plan(self, row: RowInput, busy: set[int]) -> StateRow:
        slot, held = row.slot, self._held[row.slot]
        if slot == self.slots:  # padding
            return StateRow(slot, 0)
        if row.start == 0 and held:
            self._held[slot] = held = 0
        keep = max(held, row.end if row.settled is None else min(row.settled, row.end))
        if held > row.start or row.end - keep > MAX_UNSETTLED or row.paths is not None:
            raise ValueError(f"a row's columns {row.start} … {row.end} can't follow its state after {held} columns")
        source = self._sources[slot]
        snapshot_at, cell = -1, 0
        wanted = self._wanted[slot]
        while wanted and wanted[0][0] <= keep:
            column, key = wanted.pop(0)
            if column > held and snapshot_at < 0:
                cell = self._new_cell(key, busy)
                snapshot_at = column if cell else -1
        self._held[slot], self._sources[slot] = keep, slot
        return StateRow(source, held, keep, snapshot_at, cell)

    def begin(self, slot: int, keys: Sequence[bytes], pages: int, known: int) -> None:
        """Let a slot begin with the state after its first pages, which have a snapshot, or with none.

        keys: of the pages of the prompt. pages: that the slot holds. known: that somebody holds.
        """
        self.clear(slot)
        if pages:
            self._sources[slot] = self._snapshots[keys[pages - 1]]
            self._held[slot] = pages * self._page_size
        for boundary in sorted({known, len(keys)}):
            if boundary > pages:
                self._wanted[slot].append((boundary * self._page_size, keys[boundary - 1]))

    def longest(self, keys: Sequence[bytes], known: int) -> int:
        """Return after how many of the first `known` pages there is a snapshot, at most."""
        for pages in range(known, 0, -1):
            if keys[pages - 1] in self._snapshots:
                self._snapshots.move_to_end(keys[pages - 1])
                return pages
        return 0

    def clear(self, slot: int) -> None:
        """Let a slot have no state."""
        self._held[slot], self._sources[slot] = 0, slot
        self._wanted[slot].clear()

    def fork(self, source: int, target: int, end: int) -> int:
        """Let the target have the state of the source, whose first `end` columns it gets.

        Returns the cell to copy from. Raises ValueError if the source's state holds more columns.
        """
        if self._held[source] > end:
            raise ValueError(f"a state after {self._held[source]} columns has no copy after {end}")
        self.clear(target)
        self._held[target] = self._held[source]
        return self._sources[source]

    def lose(self, slots: Iterable[int]) -> None:
        """Note that a forward of these slots failed: their states may be half written, and are of no use until `clear`.

        Snapshots are forgotten, because some may have been written in it.
        """
        for slot in slots:
            self._held[slot] = _LOST
        self._snapshots.clear()
        self._free = list(range(self.slots + 1, self.cells))

    def can_go_on(self, slot: int, column: int) -> bool:
        """Whether the next token of a slot's text may be that of a column: its state holds no later ones."""
        return self._held[slot] <= column

    def _new_cell(self, key: bytes, busy: set[int]) -> int:
        """Return a cell for a snapshot; 0: there is none, or it is known."""
        if key in self._snapshots:
            return 0
        if not self._free:
            oldest = next((known for known, cell in self._snapshots.items() if cell not in busy), None)
            if oldest is None:
                return 0
            self._free.append(self._snapshots.pop(oldest))
        self._snapshots[key] = self._free.pop()
        return self._snapshots[key]
