"""Rows: the requests of a model replica, each in a KV slot or waiting for one. Knows nothing of forwards.

Rows take over pages that others have computed, before they enter and while their own prompt is computed.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from actors.model.forward_input import RowInput
from actors.model.page_tables import PageTables, extend_keys
from actors.wire.messages import Admit, Report
from decoding.grammars.structure import StructureState

PREPARING_S = 0.002  # polling period while no row is ready
RowKey = tuple[str, int]  # (peer that admitted the request, request_id)


class Row:
    """State that rows of all loops share: tokens, KV slot, and how many tokens the slot holds."""

    def __init__(self, peer: str, admit: Admit) -> None:
        self.key: RowKey = (peer, admit.request_id)
        self.admission = admit.admission
        self.params = admit.params
        self.prompt_length = admit.prompt_length
        self.draft_length = admit.draft_length
        self.tokens = list(admit.tokens)
        self.cached = 0
        self.slot = -1
        self.slots_needed = 1
        self.more_slots: list[int] = []  # beside `slot`, if more than one is needed
        self.page_keys: list[bytes] = []  # of the text's first full pages, as far as they were needed
        self.waits_for_pages = False  # whether another row is computing this row's next page
        self.preparing: Future[StructureState] | None = None
        self.structure: StructureState | None = None  # the grammar's state after the answer so far
        self.attached_drafter: str | None = None  # the drafter that gets Advance, unless colocated
        self.last_step = 0  # number of the last step it took part in, as OomBackoff counts

    def undo(self) -> None:
        """Discard what was prepared for a forward that failed."""

    @property
    def pending(self) -> int:
        """Number of tokens that are not yet in the cache."""
        return len(self.tokens) - self.cached

    @property
    def ready(self) -> bool:
        """Whether the row can run: its grammar is compiled, and no other row is computing its next page."""
        return self.preparing is None and not self.waits_for_pages

    @property
    def cached_prefix(self) -> int:
        """Number of leading tokens that the slot's first columns hold, in order."""
        return self.cached

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def may_share(self) -> bool:
        """Whether keys and values computed for another request may be used."""
        return True

    @property
    def resting(self) -> bool:
        """Whether the row is paused, so its pending tokens are not being computed."""
        return False

    @property
    def slots(self) -> list[int]:
        """All of its slots."""
        return [self.slot, *self.more_slots]

    def resume(self, count: int) -> None:
        """Continue after the first `count` tokens, which the slot holds as text. Columns after them mean nothing."""
        self.cached = count

    def next_input(self, limit: int) -> RowInput:
        """Return the input for the next pending tokens, at most `limit`."""
        return RowInput(self.slot, self.cached, self.tokens[self.cached : self.cached + limit])


R = TypeVar("R", bound=Row)


class RowTable(Generic[R]):
    """Rows by key, in order of admission. Rows wait until there are a slot and pages for their text."""

    def __init__(self, cache: PageTables, removed: Callable[[R], None] = lambda row: None) -> None:
        """removed: called with each row that is removed."""
        self._cache = cache
        self._removed = removed
        self._active: dict[RowKey, R] = {}
        self._waiting: dict[RowKey, R] = {}
        self.preemptions = 0
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
        """Give the row a slot, now or as soon as there is room. Replace a row of the same key."""
        self.remove(row.key)
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
            self._free_slots(row)
            self._fill_slots()

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

    def preempt_youngest(self) -> bool:
        """Preempt the row that entered last, unless it is the only one with pages. Returns whether it did."""
        with_pages = [row for row in self._active.values() if any(map(self._cache.held_pages, row.slots))]
        if len(with_pages) > 1:
            self.preempt(with_pages[-1])
        return len(with_pages) > 1

    def preempt(self, row: R) -> None:
        """Free the row's pages. It waits, before all others, and computes anew what it can't take over then."""
        del self._active[row.key]
        self._free_slots(row)
        row.slot, row.more_slots = -1, []
        row.undo()
        row.resume(0)
        self._waiting = {row.key: row, **self._waiting}
        self.preemptions += 1

    def make_ready(self) -> list[tuple[R, BaseException]]:
        """Let rows enter, share pages and get their grammars. Return rows whose grammar failed, with the error."""
        for row in self._active.values():
            self._note_text(row)
        self._fill_slots()
        failed: list[tuple[R, BaseException]] = []
        computing: set[bytes] = set()  # the next page of each row
        for row in self._active.values():
            if row.preparing is not None and row.preparing.done():
                error = row.preparing.exception()
                if error is None:
                    row.structure, row.preparing = row.preparing.result(), None
                else:
                    failed.append((row, error))
            self._share_pages(row, computing)
        return failed

    def _note_text(self, row: R) -> None:
        """Let others take over the row's full pages."""
        full = min(row.cached_prefix, len(row.tokens)) // self._cache.page_size
        if self._cache.known_pages(row.slot) < full <= self._cache.held_pages(row.slot):
            extend_keys(row.page_keys, row.tokens, full, self._cache.page_size)
            self._cache.note_text(row.slot, row.page_keys[:full])

    def _share_pages(self, row: R, computing: set[bytes]) -> None:
        """Take over pages of the row's prompt. If a row before it computes the next one, it waits a turn."""
        row.waits_for_pages = False
        reusable = self._reusable_pages(row)
        if reusable <= row.cached // self._cache.page_size or row.cached_prefix < row.cached:
            return
        held = self._cache.extend(row.slot, row.page_keys[:reusable], row.cached)
        if held > row.cached:
            row.resume(held)
        page = row.cached // self._cache.page_size
        if page < reusable and row.preparing is None and not row.resting:
            row.waits_for_pages = row.page_keys[page] in computing
            computing.add(row.page_keys[page])

    def _reusable_pages(self, row: R) -> int:
        """Return how many pages of the row's text need not be computed if others have them, and compute their keys."""
        if not row.may_share:
            return 0
        count = (len(row.tokens) - 1) // self._cache.page_size  # the last token is always run
        extend_keys(row.page_keys, row.tokens, count, self._cache.page_size)
        return count

    def _fill_slots(self) -> None:
        while self._waiting:
            row = next(iter(self._waiting.values()))
            if self._cache.free < row.slots_needed or not self._has_pages_for(row):
                return
            del self._waiting[row.key]
            row.slot, held = self._cache.take(row.page_keys[: self._reusable_pages(row)])
            row.more_slots = [self._cache.take()[0] for _ in range(row.slots_needed - 1)]
            row.resume(held)
            self._active[row.key] = row

    def _has_pages_for(self, row: R) -> bool:
        """Whether there are pages for the row's text beside what active rows still need, and one for each to grow."""
        if not self._active:
            return True
        keys = row.page_keys[: self._reusable_pages(row)]
        needed = self._cache.missing_pages(keys, len(row.tokens) + 1) + row.slots_needed - 1
        for other in self._active.values():
            pages = len(other.tokens) // self._cache.page_size + 1 + other.slots_needed
            most = other.slots_needed * self._cache.pages_per_slot
            needed += max(0, min(pages, most) - self._cache.held_pages(other.slot))
        return needed <= self._cache.allocator.available

    def _free_slots(self, row: R) -> None:
        self._note_text(row)
        for slot in row.slots:
            self._cache.give_back(slot)


def choose_prefill(rows: Iterable[R], budget: int) -> list[R]:
    """Choose the first rows whose next chunks together fit `budget` tokens; at least one."""
    chosen: list[R] = []
    tokens = 0
    for row in rows:
        tokens += min(row.pending, budget)
        if chosen and tokens > budget:
            break
        chosen.append(row)
    return chosen


def in_slot_order(rows: Iterable[R]) -> list[R]:
    """Sort rows by slot, so that neighbouring slots are read as one slice of the cache, without a copy."""
    return sorted(rows, key=lambda row: row.slot)
