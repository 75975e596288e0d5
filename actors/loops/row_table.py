"""Rows: the requests that a model replica works on, each in a KV slot, and those that wait for one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from actors.model.forward_input import RowInput
from actors.model.kv_slots import LEAST_SHARED, SlotCache, common_prefix
from actors.wire.messages import Admit, Report
from decoding.grammars.structure import StructureState

PREPARING_S = 0.002  # how often to look whether rows are ready, where none is
RowKey = tuple[str, int]  # the coordinator that admitted the request, request_id


class Row:
    """What every row has: its tokens, and how many of them its KV slot holds. Each loop adds its own state."""

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
        self.more_slots: list[int] = []  # beside `slot`, where more than one are needed
        self.donor: Row | None = None  # a row from whose slot the first `shared` tokens are to be copied
        self.shared = 0
        self.preparing: Future[StructureState] | None = None
        self.structure: StructureState | None = None  # what the answer must match
        self.attached_drafter: str | None = (
            None  # the drafter that is told how the text goes on, if it is not in this thread
        )
        self.stepped_at = 0  # the loop's last step that it was in, as `Shortage` counts them

    def undo(self) -> None:
        """The forward that it was in has failed, so what was prepared for that is not to be relied on."""

    @property
    def pending(self) -> int:
        """How many tokens are known but not yet in the cache."""
        return len(self.tokens) - self.cached

    @property
    def ready(self) -> bool:
        """Whether it has all that it needs to run."""
        return self.donor is None and self.preparing is None

    @property
    def cached_prefix(self) -> int:
        """How many of the tokens are in the slot's first columns, one after the other."""
        return self.cached

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def may_share(self) -> bool:
        """Whether tokens that were computed for another request will do."""
        return True

    @property
    def resting(self) -> bool:
        """Whether its pending tokens are not being computed now."""
        return False

    def texts(self) -> list[tuple[int, list[int]]]:
        """Each of its slots, and the tokens that the slot's first columns hold."""
        return [(self.slot, self.tokens[: self.cached_prefix])]

    def resume(self, count: int) -> None:
        """The slot holds the first `count` tokens, computed for another request."""
        self.cached = count

    def next_input(self, limit: int) -> RowInput:
        """The next pending tokens, at most `limit`."""
        return RowInput(self.slot, self.cached, self.tokens[self.cached : self.cached + limit])


R = TypeVar("R", bound=Row)


class RowTable(Generic[R]):
    """Rows by key, in order of admission; those beyond the number of slots wait in line."""

    def __init__(self, cache: SlotCache, removed: Callable[[R], None] = lambda row: None) -> None:
        """removed: is called with each row that is removed."""
        self._cache = cache
        self._removed = removed
        self._active: dict[RowKey, R] = {}
        self._waiting: dict[RowKey, R] = {}
        self.drafting = True  # whether drafts for them are wanted
        self.trying = False  # whether that is so only for a trial, or not so
        self.speculation_gain = 1.0  # as in Report

    def __iter__(self) -> Iterator[R]:
        """The rows that hold a slot."""
        return iter(self._active.values())

    def __len__(self) -> int:
        return len(self._active)

    def get(self, key: RowKey) -> R | None:
        return self._active.get(key) or self._waiting.get(key)

    def add(self, row: R) -> None:
        """Give the row a slot, now or when one is free. A row of the same key is replaced."""
        self.remove(row.key)
        self._waiting[row.key] = row
        self._fill_slots()

    def remove(self, key: RowKey) -> None:
        """Forget the row and free its slot; unknown keys are ignored."""
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
        """Forget all rows of a coordinator."""
        for key in [key for key in (*self._active, *self._waiting) if key[0] == peer]:
            self.remove(key)

    def report(self, peer: str | None = None) -> Report:
        """The load of all coordinators together, and which requests of `peer` are here."""
        asked = [row for row in (*self._active.values(), *self._waiting.values()) if row.key[0] == peer]
        attached_drafters = {row.key[1]: row.attached_drafter for row in asked if row.attached_drafter is not None}
        return Report(
            len(self._active),
            len(self._waiting),
            self._cache.slots,
            [row.key[1] for row in asked],
            self.drafting and not self.trying,
            attached_drafters,
            self.speculation_gain,
        )

    def make_ready(self) -> list[tuple[R, BaseException]]:
        """Give rows what they wait for, if it is there by now. Returns those that can never be ready, and why."""
        failed: list[tuple[R, BaseException]] = []
        for row in self._active.values():
            if row.donor is not None:
                self._inherit(row, row.donor)
            if row.preparing is not None and row.preparing.done():
                error = row.preparing.exception()
                if error is None:
                    row.structure, row.preparing = row.preparing.result(), None
                else:
                    failed.append((row, error))
        return failed

    def _inherit(self, row: R, donor: Row) -> None:
        """Copy what the donor has computed, once that is all that is shared, or all that it will be."""
        if self._active.get(donor.key) is donor:
            if donor.cached_prefix < row.shared and not donor.resting:
                return
            same = common_prefix(donor.tokens, row.tokens)  # either may have been written anew since
            given = min(row.shared, donor.cached_prefix, same)
            if given > row.cached:
                self._cache.copy(donor.slot, row.slot, row.cached, given)
                row.resume(given)
        row.donor = None

    def _fill_slots(self) -> None:
        while self._waiting and self._cache.free >= next(iter(self._waiting.values())).slots_needed:
            row = self._waiting.pop(next(iter(self._waiting)))
            needless = row.tokens[:-1] if row.may_share else []  # the last token must be run in any case
            row.slot, held = self._cache.take(needless)
            row.more_slots = [self._cache.take()[0] for _ in range(row.slots_needed - 1)]
            row.resume(held)
            self._find_donor(row, needless, held + LEAST_SHARED)
            self._active[row.key] = row

    def _find_donor(self, row: R, tokens: list[int], least: int) -> None:
        """The row that shares most of the tokens, if that is enough."""
        shared = [(common_prefix(other.tokens, tokens), other) for other in self._active.values()]
        if shared:
            count, donor = max(shared, key=lambda pair: pair[0])
            if count >= least:
                row.donor, row.shared = donor, count


def choose_prefill(rows: Iterable[R], budget: int) -> list[R]:
    """The first rows whose next chunks fit together into `budget` tokens; at least one."""
    chosen: list[R] = []
    tokens = 0
    for row in rows:
        tokens += min(row.pending, budget)
        if chosen and tokens > budget:
            break
        chosen.append(row)
    return chosen


def in_slot_order(rows: Iterable[R]) -> list[R]:
    """So that rows in neighbouring slots read the cache as one slice, without a copy."""
    return sorted(rows, key=lambda row: row.slot)
