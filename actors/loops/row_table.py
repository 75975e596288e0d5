"""Rows: the requests of a model replica, each in a KV slot or waiting for one. Knows nothing of forwards."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from actors.model.forward_input import RowInput
from actors.model.kv_pages import LEAST_SHARED, KVPages, common_prefix
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
        self.donor: Row | None = None  # row from whose slot the first `shared` tokens will be copied
        self.shared = 0
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
        """Whether the row can run: nothing is left to copy or compile."""
        return self.donor is None and self.preparing is None

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

    def texts(self) -> list[tuple[int, list[int]]]:
        """Return each of its slots with the tokens in the slot's first columns."""
        return [(self.slot, self.tokens[: self.cached_prefix])]

    def resume(self, count: int) -> None:
        """Continue after the first `count` tokens, which the slot already holds."""
        self.cached = count

    def next_input(self, limit: int) -> RowInput:
        """Return the input for the next pending tokens, at most `limit`."""
        return RowInput(self.slot, self.cached, self.tokens[self.cached : self.cached + limit], wanted=1)


R = TypeVar("R", bound=Row)


class RowTable(Generic[R]):
    """Rows by key, in order of admission. Rows without a free slot wait."""

    def __init__(self, cache: KVPages, removed: Callable[[R], None] = lambda row: None) -> None:
        """removed: called with each row that is removed."""
        self._cache = cache
        self._removed = removed
        self._active: dict[RowKey, R] = {}
        self._waiting: dict[RowKey, R] = {}
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
            for slot, text in row.texts():
                self._cache.give_back(slot, text)
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
        while self._waiting and self._cache.free >= next(iter(self._waiting.values())).slots_needed:
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
