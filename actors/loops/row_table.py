"""The rows of a model replica, each in a KV slot or waiting for one.

Rows take over pages that others have computed, before they enter and while their own prompt is computed.
"""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Generic

from actors.loops.row import R, Row, RowKey
from actors.wire.messages import AdaptationState, Report, Weights, WeightsState
from engine.model.page_allocator import PageKeys
from engine.model.page_tables import PageTables

PREPARING_S = 0.002  # polling period while no row is ready
_MAX_PASSED = 8  # rows that have no room for now, and let others enter before them


class RowTable(Generic[R]):
    """Rows by key. Rows wait until they are prepared, and until there are a slot and pages for their text.

    They enter in the order of `Row.precedence`. What a row leaves free because it needs more, and the slots of one that
    `lends` them, serve rows behind it until it has room with theirs. Requests that span replicas borrow nothing.
    """

    def __init__(self, cache: PageTables, removed: Callable[[R], None] = lambda row: None) -> None:
        """removed: called with each row that is removed."""
        self._cache = cache
        self._removed = removed
        self._active: dict[RowKey, R] = {}
        self._waiting: dict[RowKey, R] = {}
        self.preemptions = 0  # of rows, for the sake of others
        self._is_full = False  # whether a row was preempted, and no forward has run since
        self.drafting = True  # whether drafts are wanted
        self.in_trial = False  # whether `drafting` was set for a trial only
        self.speculation_gain = 1.0  # as in Report
        self.adaptation: AdaptationState | None = None  # as in Report
        self.weights = WeightsState()  # as in Report
        self.by_weights = False  # whether rows run with the weights of their admissions only

    def __iter__(self) -> Iterator[R]:
        return iter(self._active.values())

    def __len__(self) -> int:
        return len(self._active)

    def get(self, key: RowKey) -> R | None:
        return self._active.get(key) or self._waiting.get(key)

    def add(self, row: R) -> None:
        """Give the row a slot, now or as soon as there is room. Replace a row of the same key."""
        self.remove(row.key)
        self._waiting[row.key] = row
        self._fill_slots()

    def remove(self, key: RowKey) -> None:
        """Remove the row and free its slot. Unknown keys are ignored."""
        row = self._waiting.pop(key, None)
        if row is not None:
            if row.preparing is not None:
                row.preparing.cancel()
            self._removed(row)
        row = self._active.pop(key, None)
        if row is not None:
            self._removed(row)
            self._free_slots(row)
            self._is_full = False
            self._fill_slots()

    def remove_peer(self, peer: str) -> None:
        for key in [key for key in (*self._active, *self._waiting) if key[0] == peer]:
            self.remove(key)

    def report(self, peer: str | None = None) -> Report:
        """Return the total load, and the requests of `peer` that are here."""
        preparing, waiting = self._divide()
        rows = [row for row in (*self._active.values(), *preparing, *waiting) if row.key[0] == peer]
        attached_drafters = {row.key[1]: row.attached_drafter for row in rows if row.attached_drafter is not None}
        return Report(
            len(self._active) + len(preparing),
            len(waiting),
            self._cache.slots,
            [row.key[1] for row in rows],
            self.drafting and not self.in_trial,
            attached_drafters,
            self.speculation_gain,
            self._cache.allocator.pages,
            self._cache.allocator.used,
            self._cache.allocator.shared,
            self.adaptation,
            sum(row.key[0] == peer for row in waiting),
            weights=self.weights,
        )

    def first_weights(self) -> Weights | None:
        """Return the weights of the first row that waits, of those that can be loaded; None: no row waits."""
        rows = [row for row in self._waiting.values() if row.weights.version != self.weights.unfit]
        return min(rows, key=attrgetter("precedence")).weights if rows else None

    def _divide(self) -> tuple[list[R], list[R]]:
        """Return the rows that are being prepared, and those that wait for a slot or for pages."""
        rows = tuple(self._waiting.values())
        return [row for row in rows if not row.prepared], [row for row in rows if row.prepared]

    @property
    def is_preparing(self) -> bool:
        """Whether a row will be ready later, without a message."""
        return not all(row.ready for row in self._active.values()) or not all(
            row.prepared for row in self._waiting.values()
        )

    @property
    def evictions(self) -> int:
        """Number of known pages that were used again so far."""
        return self._cache.allocator.evictions

    def preempt_last(self) -> bool:
        """Preempt the last row by precedence, unless it is the only one. Returns whether it did.

        Nothing enters beside other rows before `note_forward`: else the same row would take the same pages again.
        """
        if len(self._active) < 2:
            return False
        self.preempt(max(self._active.values(), key=attrgetter("precedence")))
        self._is_full = True
        return True

    def preempt(self, row: R) -> None:
        """Free the row's slots and pages. It waits in its order, and computes anew what it can't take over then."""
        del self._active[row.key]
        self._free_slots(row)
        row.more_slots = []
        row.preemptions += 1
        self.preemptions += 1
        for text in row.texts:
            text.slot = -1
            text.undo()
            text.resume(0)
        self._waiting[row.key] = row

    def restart_if_lost(self, row: R) -> None:
        """Preempt a row whose text can't go on, because a failed step has changed its state."""
        owner = self._active.get(row.owner.key)
        if owner is None or owner is not row.owner:
            return
        held = [(text.slot, text.cached) for text in owner.texts] + [(slot, owner.cached) for slot in owner.more_slots]
        if not all(self._cache.can_go_on(*columns) for columns in held):
            self.preempt(owner)

    def note_forward(self) -> None:
        self._is_full = False

    def make_ready(self) -> list[tuple[R, BaseException]]:
        """Let rows get their grammars, enter and share pages. Return rows whose grammar failed, with the error."""
        known, page_size = self._cache.known, self._cache.page_size
        for text in self._texts():
            if min(text.cached, text.prompt_length) // page_size > known[text.slot]:
                self._note_text(text)  # the answer's pages when it ends
        failed = self._take_grammars()
        self._fill_slots(preempt=True)
        computing: dict[bytes, Row] = {}  # who computes a page next
        for text in self._texts():
            text.waits_for_pages, text.shortest_waiting = False, sys.maxsize
            if len(text.tokens) - text.cached > 1 and self._cache.extends:
                self._share_pages(text, computing)
        return failed

    def _texts(self) -> Iterator[Row]:
        return (text for row in self._active.values() for text in row.texts)

    def _take_grammars(self) -> list[tuple[R, BaseException]]:
        failed: list[tuple[R, BaseException]] = []
        for row in self._waiting.values():
            if row.preparing is not None and row.preparing.done():
                error = row.preparing.exception()
                if error is None:
                    row.structure, row.preparing = row.preparing.result(), None
                else:
                    failed.append((row, error))
        return failed

    def _note_text(self, row: Row) -> None:
        full = min(row.cached_prefix, len(row.tokens)) // self._cache.page_size
        if self._cache.known[row.slot] < full <= self._cache.held_pages(row.slot):
            self._cache.note_text(row.slot, self._keys(row, full))

    def _share_pages(self, row: Row, computing: dict[bytes, Row]) -> None:
        """Take over pages of the row's prompt. If a row before it computes the next one, it waits a turn."""
        if (len(row.tokens) - 1) // self._cache.page_size <= row.cached // self._cache.page_size:
            return
        keys = self._reusable_keys(row)
        if not keys or row.cached_prefix < row.cached:
            return
        held = self._cache.extend(row.slot, keys, row.cached)
        if held > row.cached:
            row.reused = (row.reused or 0) + held - row.cached
            row.resume(held)
        page = row.cached // self._cache.page_size
        if page == len(keys):
            return
        if self._cache.is_known(keys[page]):  # it takes over more in the next turn
            row.waits_for_pages = True
        elif not row.resting:
            first = computing.setdefault(keys[page], row)
            if first is not row:
                row.waits_for_pages, first.shortest_waiting = True, min(first.shortest_waiting, row.pending)

    def _reusable_keys(self, row: Row) -> PageKeys:
        """Return the keys of the pages of the row's text that need not be computed if others have them."""
        count = (len(row.tokens) - 1) // self._cache.page_size  # the last token is always run
        return self._keys(row, count if row.may_share else 0)

    def _keys(self, row: Row, count: int) -> PageKeys:
        return PageKeys(row.page_keys, row.tokens, count, self._cache.page_size, row.cache_salt)

    def _fill_slots(self, *, preempt: bool = False) -> None:
        """Let rows enter in order. Rows behind one without room use what is free meanwhile.

        preempt: preempt rows that yield; only while no row is in a forward or about to commit.
        """
        yielding = [row for row in self._active.values() if row.may_yield] if preempt and self._waiting else []
        if not self._waiting or not (self._cache.free or yielding):
            return
        waiting = self._of_present_weights(self._divide()[1])
        lenders = [row.precedence for row in (*waiting, *self._active.values()) if row.lends]
        first_lender = min(lenders, default=None)
        passed = 0
        for row in sorted(waiting, key=attrgetter("lends", "precedence")):
            if passed and row.spans_replicas:
                continue
            if self._make_room(row, yielding):
                self._enter(row)
                borrows = passed or (first_lender is not None and first_lender < row.precedence)
                row.entered = row.entered or not borrows
            elif passed == _MAX_PASSED:
                return
            else:
                passed += 1

    def _of_present_weights(self, rows: list[R]) -> list[R]:
        """Return the rows that run with the present weights, up to the first row that waits for others."""
        if not self.by_weights or self.weights.asleep:
            return [] if self.weights.asleep else rows
        known = self.weights.present.version, self.weights.unfit
        others = [row.precedence for row in self._waiting.values() if row.weights.version not in known]
        first = min(others, default=(True, math.inf, 0))
        return [row for row in rows if row.weights.version == known[0] and row.precedence < first]

    def _enter(self, row: R) -> None:
        del self._waiting[row.key]
        for text in row.texts:
            text.slot, held = self._cache.take(self._reusable_keys(text))
            text.resume(held)
            if text.reused is None:  # a row that was preempted takes over its own pages
                text.reused = held
        row.more_slots = [self._cache.take()[0] for _ in range(row.slots_needed - len(row.texts))]
        row.has_lent = False
        self._active[row.key] = row

    def _make_room(self, row: R, yielding: Iterable[R]) -> bool:
        """Preempt rows that yield to this one, the last first and as few as suffice. Returns whether it has room."""
        later = [other for other in yielding if other.slot >= 0 and _yields(other, row)]
        later.sort(key=attrgetter("precedence"), reverse=True)
        count = 0
        if not self._has_room(row, ()):
            if not later or not self._has_room(row, later):
                return False
            fewer = range(len(later))
            count = bisect_left(fewer, True, lo=1, key=lambda most: self._has_room(row, later[:most]))
        for other in later[:count]:
            other.has_lent = other.lends and not row.spans_replicas
            self.preempt(other)
        return True

    def _has_room(self, row: R, leaving: Sequence[R]) -> bool:
        """Whether the row would have its slots and pages, and each other row a page to grow, if some rows left."""
        slots = [slot for other in leaving for slot in other.slots]
        if self._cache.free + len(slots) < row.slots_needed:
            return False
        gone = set(leaving)
        staying = [other for other in self._active.values() if other not in gone]
        if not staying:
            return True
        if self._is_full and not leaving:
            return False
        left = self._cache.allocator.available - row.slots_needed + 1
        left -= sum(map(self._pages, row.texts[1:]))  # does not count those that these share
        for other in staying:
            held = sum(map(self._cache.held_pages, other.slots))
            missing = [max(0, self._pages(text) - self._cache.held_pages(text.slot)) for text in other.texts]
            left -= min(sum(missing) + other.slots_needed, other.slots_needed * self._cache.pages_per_slot - held)
        if not self._fits(row, left + sum(map(self._cache.held_pages, slots))):  # does not count shared pages
            return False
        released = self._cache.released_pages(slots)
        return not slots or self._fits(row, left + len(released), released)

    def could_hold(self, row: R, tokens: int) -> bool:
        """Whether a row that is alone has pages for an answer of so many tokens after the prompt of each text."""
        size = self._cache.page_size
        texts: list[Row] = [*row.texts, *[row] * (row.slots_needed - len(row.texts))]
        full = {key for text in row.texts for key in self._keys(text, text.prompt_length // size)}
        lengths = [text.prompt_length for text in texts]
        own = [-(-(length + tokens - 1) // size) - length // size for length in lengths]  # the last token is not run
        return len(full) + sum(own) <= self._cache.allocator.pages

    def _fits(self, row: R, left: int, released: Container[int] = ()) -> bool:
        """Whether `left` pages and those that it shares are enough for the row. released: pages that become free."""
        shared = self._pages(row) - left
        keys = self._reusable_keys(row)
        return shared <= 0 or (shared <= len(keys) and self._cache.are_held(keys, shared, released))

    def _pages(self, text: Row) -> int:
        """Return how many pages of its slot a text needs, with its next token and a draft."""
        return -(-min(len(text.tokens) + 1 + text.draft_length, self._cache.capacity) // self._cache.page_size)

    def _free_slots(self, row: R) -> None:
        for text in row.texts:
            self._note_text(text)
        for slot in row.slots:
            self._cache.give_back(slot)


def _yields(row: Row, other: Row) -> bool:
    """Whether a row that may yield does so to another one that waits."""
    return not other.lends and (row.precedence > other.precedence or (row.lends and not other.spans_replicas))
