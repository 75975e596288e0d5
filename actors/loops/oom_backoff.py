"""Out-of-memory backoff: a loop computes less at once when memory runs out, and later more again.

KV pages are allocated at the start, so only activations can exceed the device's memory. Freeing a row's pages would
not help. So rows keep their slots and take turns. If the pages run out, the youngest row is preempted. Knows nothing of
models, messages or drafts.
"""

import logging
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Generic, TypeVar

import torch

from actors.loops.row_table import R, Row, in_slot_order
from actors.loops.thread import LoopTimes
from decoding.errors import OutOfPagesError, UnavailableError

_log = logging.getLogger(__name__)
AnyRow = TypeVar("AnyRow", bound=Row)
_FORWARDS_BEFORE_RAISE = 256  # consecutive forwards with enough memory before limits are raised


class OomBackoff(Generic[R]):
    """Limits on what one loop computes at once."""

    def __init__(
        self,
        slots: int,
        times: LoopTimes,
        give_up: Callable[[R, UnavailableError], None],
        *,
        prefill_chunk: int,
        preempt: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        slots: number of KV slots.
        give_up: called with a row that can't run even alone.
        prefill_chunk: prompt tokens per chunk while memory suffices.
        preempt: frees the pages of a row; returns False if no other row would have any then.
        """
        self._preempt = preempt
        self._slots, self._times, self._give_up, self._full_chunk = slots, times, give_up, prefill_chunk
        self._steps = 0
        self._remove_limits()

    def _remove_limits(self) -> None:
        self.prefill_chunk = self._full_chunk
        self.speculates = True  # whether memory suffices for draft tokens
        self._max_slots = self._slots  # limit for the rows of one step
        self._successes = 0  # forwards since memory last ran out

    def choose(self, rows: Sequence[AnyRow]) -> list[AnyRow]:
        """Choose the rows of the next step, least recently stepped first: at least one, in slot order."""
        chosen: list[AnyRow] = []
        slots = 0
        for row in sorted(rows, key=lambda row: row.last_step):
            slots += row.slots_needed
            if chosen and slots > self._max_slots:
                break
            chosen.append(row)
        return in_slot_order(chosen)

    def prefill(self, compute: Callable[[], None], rows: Sequence[R]) -> None:
        """Compute a chunk of the rows' prompts. Halve the chunk size if memory runs out."""
        if self._try(compute, rows):
            return
        if self.prefill_chunk > 1:
            self.prefill_chunk //= 2
        else:
            self._give_up_on(rows[0])

    def step(self, compute: Callable[[], None], rows: Sequence[R]) -> None:
        """Take a step. If memory runs out, stop speculation first, then halve the number of rows."""
        if self._try(compute, rows):
            self._steps += 1
            for row in rows:
                row.last_step = self._steps
            return
        if self.speculates:
            self.speculates = False
        elif len(rows) > 1:
            self._max_slots = sum(row.slots_needed for row in rows) // 2
        else:
            self._give_up_on(rows[0])

    def _try(self, compute: Callable[[], None], rows: Sequence[R]) -> bool:
        """Compute. If memory runs out, undo and return False."""
        try:
            compute()
        except torch.OutOfMemoryError as error:
            _log.warning("out of memory with %d rows: %s", len(rows), error)
            clear_frames(error.__traceback__)  # its frames hold tensors
        except OutOfPagesError as error:
            for row in rows:
                row.undo()
            if not self._preempt():
                self._give_up(
                    rows[0], UnavailableError(f"the request does not fit into the KV cache, even alone: {error}")
                )
            return True
        else:
            self._successes += 1
            if self._successes % _FORWARDS_BEFORE_RAISE == 0:
                self._raise_limits()
            return True
        torch.cuda.empty_cache()
        self._times.out_of_memory += 1
        self._successes = 0
        for row in rows:
            row.undo()
        return False

    def _raise_limits(self) -> None:
        self.prefill_chunk = min(2 * self.prefill_chunk, self._full_chunk)
        self._max_slots = min(2 * self._max_slots, self._slots)
        self.speculates = True

    def _give_up_on(self, row: R) -> None:
        """Give up a row that can't run alone. Remove all limits: this row was their cause."""
        slots = "a KV slot" if row.slots_needed == 1 else f"{row.slots_needed} KV slots"
        reason = f"the device has too little memory for it, even alone: {len(row.tokens)} tokens in {slots}"
        self._give_up(row, UnavailableError(reason))
        self._remove_limits()
