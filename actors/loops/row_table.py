"""The rows of a model replica, each in a KV slot or waiting for one. Knows nothing of forwards."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic

from actors.loops.row import R, Row, RowKey
from actors.model.kv_slots import LEAST_SHARED, SlotCache, common_prefix
from actors.wire.messages import Report

PREPARING_S = 0.002  # polling period while no row is ready


class RowTable(Generic[R]):
    """Rows by key, in order of admission. Rows without a free slot wait."""

    def __init__(self, cache: SlotCache, removed: Callable[[R], None] = lambda row: None) -> None:
        """removed: called with each row that is removed."""
        self._cache = cache
        self._removed = removed
        self._active: dict[RowKey, R] = {}
        self._waiting: dict[RowKey, R] = {}
        self._arrivals = count(1)
        self._full = False  # whether a row was preempted, and no other has given back its memory since
        self.drafting = True  # whether drafts are wanted
        self.in_trial = False  # whether `drafting` was set for a trial only
        self.speculation_gain = 1.0  # as in Report

    def __iter__(self) -> Iterator[R]:
        """Iterate over the rows that hold a slot."""
        return iter(self._active.values())

    def __len__(self) -> int:
        return len(self._active)

    def get(self, key: RowKey) -> R | None:
        return self._active.get(key) or self._waiting.get(key)

    def add(self, row: R) -> None:
        """Give the row a slot, now or as soon as one is free. Replace a row of the same key."""
        self.remove(row.key)
        row.arrival = next(self._arrivals)
        self._waiting[row.key] = row
        self._fill_slots()

    def remove(self, key: RowKey) -> None:
        """Remove the row and free its slot. Unknown keys are ignored."""
        row = self._waiting.pop(key, None)
        if row is not None:
            self._removed(row)
        row = self._active.pop(key, None)
        if row is not None:
            self._removed(row)
            self._give_back(row)
            self._full = False
            self._fill_slots()

    def preempt(self, row: R) -> None:
        """Take the row's slots away. It waits before all that came later, until another row is removed."""
        del self._active[row.key]
        self._give_back(row)
        row.preempt()
        row.donor = None
        self._full = True
        self._waiting = dict(sorted({**self._waiting, row.key: row}.items(), key=lambda item: item[1].arrival))

    def _give_back(self, row: R) -> None:
        for slot, text in row.texts():
            self._cache.give_back(slot, text)

    def remove_peer(self, peer: str) -> None:
        """Remove all rows of a peer."""
        for key in [key for key in (*self._active, *self._waiting) if key[0] == peer]:
            self.remove(key)

    def report(self, peer: str | None = None) -> Report:
        """Return the total load, and the requests of `peer` that are here."""
        rows = [row for row in (*self._active.values(), *self._waiting.values()) if row.key[0] == peer]
        attached_drafters = {row.key[1]: row.attached_drafter for row in rows if row.attached_drafter is not None}
        return Report(
            len(self._active),
            len(self._waiting),
            self._cache.slots,
            [row.key[1] for row in rows],
            self.drafting and not self.in_trial,
            attached_drafters,
            self.speculation_gain,
        )

    def make_ready(self) -> list[tuple[R, BaseException]]:
        """Copy shared tokens and take over compiled grammars. Return rows whose grammar failed, with the error."""
        failed: list[tuple[R, BaseException]] = []
        for row in self._active.values():
            if row.donor is not None:
                self._copy_shared(row, row.donor)
            if row.preparing is not None and row.preparing.done():
                error = row.preparing.exception()
                if error is None:
                    row.structure, row.preparing = row.preparing.result(), None
                else:
                    failed.append((row, error))
        return failed

    def _copy_shared(self, row: R, donor: Row) -> None:
        """Copy shared tokens from the donor, unless it is still computing them."""
        if self._active.get(donor.key) is donor:
            if donor.cached_prefix < row.shared and not donor.resting:
                return
            common = common_prefix(donor.tokens, row.tokens)  # either text may have changed since
            copied = min(row.shared, donor.cached_prefix, common)
            if copied > row.cached:
                self._cache.copy(donor.slot, row.slot, row.cached, copied)
                row.resume(copied)
        row.donor = None

    def _fill_slots(self) -> None:
        while self._waiting and not self._full and self._cache.free >= next(iter(self._waiting.values())).slots_needed:
            row = self._waiting.pop(next(iter(self._waiting)))
            reusable = row.tokens[:-1] if row.may_share else []  # the last token is always run
            row.slot, held = self._cache.take(reusable)
            row.more_slots = [self._cache.take()[0] for _ in range(row.slots_needed - 1)]
            row.resume(held)
            self._find_donor(row, reusable, held + LEAST_SHARED)
            self._active[row.key] = row

    def _find_donor(self, row: R, tokens: list[int], least: int) -> None:
        """Set the donor: the row with the longest common prefix of at least `least` tokens."""
        shared = [(common_prefix(other.tokens, tokens), other) for other in self._active.values()]
        if shared:
            count, donor = max(shared, key=lambda pair: pair[0])
            if count >= least:
                row.donor, row.shared = donor, count
