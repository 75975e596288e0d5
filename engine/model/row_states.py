"""How many columns each slot's state covers, and snapshots of states at page boundaries of texts.

A later text with the same beginning starts from the snapshot instead of reading that beginning again. Snapshots are
taken at the last page boundary of each prompt, and where a prompt diverges from those that are cached; if one forward
runs both columns, at the first only. If no cell is free, the least recently used snapshot is dropped. Draft tokens
enter neither states nor snapshots before they are accepted.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.kernels.state import RING, StateRow
from engine.model.ragged_batch import RowInput

MAX_UNSETTLED = RING // 2  # columns at the end of a row that may still be rejected
_LOST = sys.maxsize


class RowStates:
    """Cells of states: one for each slot, then one for padding, then those for snapshots."""

    def __init__(self, slots: int, snapshots: int, page_size: int) -> None:
        self.slots, self.cells, self._page_size = slots, slots + 1 + snapshots, page_size
        self._held = [0] * (slots + 1)  # by slot: how many columns its state covers
        self._sources = list(range(slots + 1))  # by slot: the cell to read its state from next
        self._wanted: list[list[tuple[int, bytes]]] = [[] for _ in range(slots + 1)]  # snapshots: column, key
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # cells by key of the last page, oldest use first

    def plan(self, rows: Sequence[RowInput]) -> list[StateRow]:
        """Return where the next forward, which runs these rows, reads and writes their states.

        Raises ValueError if a row starts before the end of its state, has more than MAX_UNSETTLED unsettled columns, or
        is a tree.
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
        known = held <= row.start <= held + MAX_UNSETTLED
        if not known or row.end - keep > MAX_UNSETTLED or row.paths is not None:
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
        """Start a slot from the snapshot after its first `pages` pages, or without a state if `pages` is 0.

        keys: of the prompt's pages. pages: how many of them the slot holds. known: how many of them are cached.
        """
        self.clear(slot)
        if pages:
            self._sources[slot] = self._snapshots[keys[pages - 1]]
            self._held[slot] = pages * self._page_size
        for boundary in sorted({known, len(keys)}):
            if boundary > pages:
                self._wanted[slot].append((boundary * self._page_size, keys[boundary - 1]))

    def longest(self, keys: Sequence[bytes], known: int) -> int:
        """Return the most pages, up to `known`, after which there is a snapshot; 0 if there is none."""
        for pages in range(known, 0, -1):
            if keys[pages - 1] in self._snapshots:
                self._snapshots.move_to_end(keys[pages - 1])
                return pages
        return 0

    def clear(self, slot: int) -> None:
        """Drop a slot's state, and the snapshots that it was to write."""
        self._held[slot], self._sources[slot] = 0, slot
        self._wanted[slot].clear()

    def fork(self, source: int, target: int, end: int) -> int:
        """Give the target slot the source's state, because it gets the source's first `end` columns.

        Returns the cell to copy from. Raises ValueError if the source's state covers more columns.
        """
        if self._held[source] > end:
            raise ValueError(f"a state that covers {self._held[source]} columns can't be cut to {end}")
        self.clear(target)
        self._held[target] = self._held[source]
        return self._sources[source]

    def lose(self, slots: Iterable[int]) -> None:
        """Note that a forward of these slots failed. Their states may be half written: don't use them until `clear`.

        All snapshots are dropped, too, because that forward may have been writing some.
        """
        for slot in slots:
            self._held[slot] = _LOST
        self.forget()

    def forget(self) -> None:
        """Drop all snapshots."""
        self._snapshots.clear()

    def can_go_on(self, slot: int, column: int) -> bool:
        """Whether the next token of a slot's text may be that of a column: its state holds no later ones."""
        return self._held[slot] <= column

    def _new_cell(self, key: bytes, busy: set[int]) -> int:
        """Return a cell for a new snapshot; 0 if no cell can be had or the snapshot exists already."""
        if key in self._snapshots:
            return 0
        taken = busy.union(self._snapshots.values())
        free = (cell for cell in range(self.slots + 1, self.cells) if cell not in taken)
        oldest = (self._snapshots[known] for known in self._snapshots if self._snapshots[known] not in busy)
        cell = next(free, 0) or next(oldest, 0)
        if cell:
            self._snapshots = OrderedDict((known, other) for known, other in self._snapshots.items() if other != cell)
            self._snapshots[key] = cell
            busy.add(cell)
        return cell
