"""Packs what rows have to run into forwards: which rows take part in a turn, and how many tokens each may run.

When memory runs out, it schedules less, and later more again. When pages run out, the last row in order makes room.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from traceback import clear_frames
from typing import Generic, NamedTuple

import torch

from actors.loops.row import R
from actors.loops.row_table import RowTable
from actors.loops.thread import LoopTimes
from decoding.errors import OutOfPagesError, UnavailableError

_log = logging.getLogger(__name__)
_FORWARDS_BEFORE_RAISE = 256  # consecutive forwards with enough memory before the limit is raised


class Share(NamedTuple, Generic[R]):
    """A row's part of a forward."""

    row: R
    tokens: int  # of a step; or the most of a chunk
    is_chunk: bool  # a part of a text, which may end anywhere; else a step


class Scheduler(Generic[R]):
    """The scheduler of one loop."""

    def __init__(
        self, rows: RowTable[R], times: LoopTimes, give_up: Callable[[R, UnavailableError], None], *, prefill_chunk: int
    ) -> None:
        """
        give_up: called with a row that can't run even alone.
        prefill_chunk: the most tokens of a turn's chunks together.
        """
        self._rows, self._times, self._give_up = rows, times, give_up
        self._prefill_chunk = prefill_chunk
        self._steps = 0
        self._remove_limit()

    def _remove_limit(self) -> None:
        self.speculates = True  # whether memory suffices for draft tokens
        self._limit = sys.maxsize  # tokens of one forward
        self._largest = 0  # the first forward for which memory did not suffice, in tokens
        self._successes = 0  # forwards since memory last ran out

    def schedule(self, due: Iterable[R]) -> list[Share[R]]:
        """Choose what the next forward runs, at least one row: steps first, then chunks with what is left.

        If memory suffices for some steps only, the rows take turns. The shares are in the order of slots.
        """
        shares: list[Share[R]] = []
        left = self._limit
        steps: list[R] = []
        chunks: list[R] = []
        for row in due:
            (chunks if row.prefilling else steps).append(row)
        for row in sorted(steps, key=attrgetter("last_step")):
            tokens = row.step_tokens
            if not shares or 0 < tokens <= left:
                shares.append(Share(row, max(1, tokens), False))
                left -= tokens
        shares += _divide(chunks, min(self._prefill_chunk, left))
        return sorted(shares, key=attrgetter("row.slot"))

    def run(self, compute: Callable[[Sequence[Share[R]]], None], shares: Sequence[Share[R]]) -> None:
        """Compute the shares; undo them if memory runs out."""
        if not shares:
            return
        try:
            compute(shares)
        except OutOfPagesError as error:
            self._undo(shares)
            if not self._rows.preempt_last():
                reason = f"the request does not fit into the KV cache, even alone: {error}"
                self._give_up(shares[0].row, UnavailableError(reason))
            self._times.preemptions = self._rows.preemptions
        except torch.OutOfMemoryError as error:
            _log.warning("out of memory with %d rows: %s", len(shares), error)
            clear_frames(error.__traceback__)  # its frames hold tensors
            torch.cuda.empty_cache()
            self._times.out_of_memory += 1
            self._undo(shares)
            self._lower_limit(shares)
        else:
            self._note_success(shares)

    def _undo(self, shares: Sequence[Share[R]]) -> None:
        for share in shares:
            share.row.undo()
            self._rows.restart_if_lost(share.row)

    def _note_success(self, shares: Sequence[Share[R]]) -> None:
        self._steps += 1
        self._rows.note_forward()
        self._times.evictions, self._times.preemptions = self._rows.evictions, self._rows.preemptions
        for share in shares:
            share.row.last_step = self._steps
        self._successes += 1
        if not self.speculates and self._successes % _FORWARDS_BEFORE_RAISE == 0:
            self._limit *= 2
            if self._limit > self._largest:
                self._remove_limit()

    def _lower_limit(self, shares: Sequence[Share[R]]) -> None:
        """Stop speculation; then halve the tokens of a forward; at last give up the row that can't run alone."""
        self._successes = 0
        tokens = sum(share.tokens for share in shares)
        if self.speculates:
            self.speculates, self._largest = False, tokens
        elif len(shares) > 1 or (tokens > 1 and shares[0].is_chunk):
            self._limit = tokens // 2
        else:
            self._give_up_on(shares[0].row)

    def _give_up_on(self, row: R) -> None:
        """Give up a row that can't run alone. Remove the limit: this row was its cause."""
        slots = "a KV slot" if row.slots_needed == 1 else f"{row.slots_needed} KV slots"
        reason = f"the device has too little memory for it, even alone: {len(row.tokens)} tokens in {slots}"
        self._give_up(row, UnavailableError(reason))
        self._remove_limit()


def _divide(rows: Sequence[R], tokens: int) -> Iterator[Share[R]]:
    """Divide so many tokens among rows that read texts: those with the least to read come first.

    Half is kept for the row that arrived first, so others at most double the turns until it has been read.
    """
    if not rows:
        return
    first = min(rows, key=attrgetter("arrived_at_s"))
    kept = min(first.pending, (tokens + 1) // 2)
    for row in sorted(rows, key=attrgetter("urgency")):
        if row is first:
            kept = 0
        share = min(row.pending, tokens - kept)
        if share > 0:
            tokens -= share
            yield Share(row, share, True)
