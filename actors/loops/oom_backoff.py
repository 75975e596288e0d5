"""What a loop does when its device runs out of memory: computes less at once, and more again later.

KV slots are allocated at the start, so what can be lacking is room for what a forward computes besides. Giving a row's
slot back would free nothing: so no row is ever computed anew. It only waits for its turn, and its slot keeps what it
holds. Knows nothing of models, messages or drafts.
"""

import logging
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Generic, TypeVar

import torch

from actors.loops.row_table import R, Row, in_slot_order
from actors.loops.thread import LoopTimes
from decoding.errors import UnavailableError

_log = logging.getLogger(__name__)
AnyRow = TypeVar("AnyRow", bound=Row)
_PATIENCE = 256  # forwards that had enough memory, before more is computed at once


class OomBackoff(Generic[R]):
    """One loop's."""

    def __init__(
        self, slots: int, times: LoopTimes, give_up: Callable[[R, UnavailableError], None], *, prefill_chunk: int
    ) -> None:
        """
        slots: of the loop's rows.
        give_up: is called with a row that can't run even alone.
        prefill_chunk: prompt tokens processed at once, with enough memory.
        """
        self._slots, self._times, self._give_up, self._whole_chunk = slots, times, give_up, prefill_chunk
        self._steps = 0
        self._relax()

    def _relax(self) -> None:
        """Compute as much at once as if nothing had been lacking."""
        self.prefill_chunk = self._whole_chunk
        self.speculates = True  # whether there is room for tokens that may be for nothing
        self._most_slots = self._slots  # whose rows may be in one step
        self._passed = 0  # forwards since memory was lacking

    def choose(self, rows: Sequence[AnyRow]) -> list[AnyRow]:
        """Those whose turn it is, as many as there is memory for; at least one."""
        chosen: list[AnyRow] = []
        slots = 0
        for row in sorted(rows, key=lambda row: row.stepped_at):
            slots += row.slots_needed
            if chosen and slots > self._most_slots:
                break
            chosen.append(row)
        return in_slot_order(chosen)

    def prefill(self, compute: Callable[[], None], rows: Sequence[R]) -> None:
        """Compute a chunk of the rows' prompts; smaller ones from now on, if that was too much."""
        if self._has_room(compute, rows):
            return
        if self.prefill_chunk > 1:
            self.prefill_chunk //= 2
        else:
            self._end(rows[0])

    def step(self, compute: Callable[[], None], rows: Sequence[R]) -> None:
        """Take a step; if that was too much, the next is one without speculation, and then one with half the rows."""
        if self._has_room(compute, rows):
            self._steps += 1
            for row in rows:
                row.stepped_at = self._steps
            return
        if self.speculates:
            self.speculates = False
        elif len(rows) > 1:
            self._most_slots = sum(row.slots_needed for row in rows) // 2
        else:
            self._end(rows[0])

    def _has_room(self, compute: Callable[[], None], rows: Sequence[R]) -> bool:
        try:
            compute()
        except torch.OutOfMemoryError as error:
            _log.warning("out of memory with %d rows: %s", len(rows), error)
            clear_frames(error.__traceback__)  # they hold what was computed so far
        else:
            self._passed += 1
            if self._passed % _PATIENCE == 0:
                self._ask_more()
            return True
        torch.cuda.empty_cache()
        self._times.out_of_memory += 1
        self._passed = 0
        for row in rows:
            row.undo()
        return False

    def _ask_more(self) -> None:
        self.prefill_chunk = min(2 * self.prefill_chunk, self._whole_chunk)
        self._most_slots = min(2 * self._most_slots, self._slots)
        self.speculates = True

    def _end(self, row: R) -> None:
        """Even alone it was too much; so it was to blame for the others' trouble."""
        slots = "a KV slot" if row.slots_needed == 1 else f"{row.slots_needed} KV slots"
        reason = f"the device has too little memory for it, even alone: {len(row.tokens)} tokens in {slots}"
        self._give_up(row, UnavailableError(reason))
        self._relax()
