"""The page tables of a KV cache: which page holds which columns of a slot, and which pages slots share.

A slot is a line of the tables. Full pages of text are known by a key made of their tokens and all tokens before, so any
slot with the same text takes them without a copy. Pages with known content that nobody holds stay until their memory is
needed, the least recently used first.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, repeat

import torch

from decoding.errors import OutOfPagesError
from engine.model.page_allocator import PAGE_SIZE, PageAllocator

_MOST_TAKEN = 512  # pages that one call takes over: a long text must not hold up the others


class PageTables:
    """Pages of slots 0 … slots - 1. One more slot, without pages, is for padding: it reads and writes page 0."""

    def __init__(self, *, slots: int, capacity: int, pages: int | None = None, page_size: int = PAGE_SIZE) -> None:
        """capacity: the most columns of a slot. pages: for all slots together; None: as many as they can ever need."""
        self.slots, self.capacity, self.page_size = slots, capacity, page_size
        self.pages_per_slot = -(-capacity // page_size)  # at most, P
        self.allocator = PageAllocator(slots * self.pages_per_slot if pages is None else pages)
        self.tables = torch.zeros(slots + 1, self.pages_per_slot, dtype=torch.int32)
        self._entries = self.tables.numpy()  # the same memory, with a faster assignment
        self.known = [0] * (slots + 1)  # of each slot's first pages, how many hold text and are known by its keys
        self._pages: list[list[int]] = [[] for _ in range(slots + 1)]  # by slot
        self._free_slots = list(range(slots))  # a heap
        self._written: dict[tuple[int, int], None] = {}  # entries that other copies of the tables lack: slot, index
        self._copies: dict[int, int] = {}  # pages whose content is still to be copied: target to source

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free_slots)

    def take(self, keys: Sequence[bytes] = ()) -> tuple[int, int]:
        """Take the lowest free slot. Return it, and how many columns of a text it has from other slots.

        keys: of the text's full pages. The caller checks `free` first.
        """
        slot = heappop(self._free_slots)
        return slot, self.extend(slot, keys, 0)

    def give_back(self, slot: int) -> None:
        """Make a slot free. Known pages stay known until their memory is needed."""
        self.clear(slot)
        heappush(self._free_slots, slot)

    def clear(self, slot: int) -> None:
        """Release all pages of a slot, so that its last pages are evicted first."""
        pages = self._pages[slot]
        for page in reversed(pages):
            self.allocator.release(page)
        self._entries[slot, : len(pages)] = 0
        self._written.update(dict.fromkeys(zip(repeat(slot), range(len(pages)), strict=False)))
        self._pages[slot], self.known[slot] = [], 0

    def clear_all(self) -> None:
        """Release the pages of all slots, after calls that took none."""
        for slot in range(self.slots):
            self.clear(slot)

    def extend(self, slot: int, keys: Sequence[bytes], held: int) -> int:
        """Take over known pages of a text whose first `held` tokens the slot has. Return how many it has then.

        Call it again while `is_known` of the next page.
        """
        first = held // self.page_size
        for index in range(first, min(first + _MOST_TAKEN, len(keys))):
            page = self.allocator.find(keys[index])
            if page is None:
                break
            self._hold(slot, index, page)
            self.known[slot], held = index + 1, (index + 1) * self.page_size
        return held

    def is_known(self, key: bytes) -> bool:
        """Return whether a slot could take over the page with this key."""
        return self.allocator.find(key) is not None

    @property
    def extends(self) -> bool:
        """Whether a slot can take over known pages while its text is read, not only at first."""
        return True

    def can_go_on(self, slot: int, column: int) -> bool:
        """Whether a slot's text can go on from a column after a failed step. Pages alone lose nothing."""
        return True

    def note_text(self, slot: int, keys: Sequence[bytes]) -> None:
        """Make the slot's first pages, which are full of text, known by these keys."""
        for index in range(self.known[slot], len(keys)):
            self._hold(slot, index, self.allocator.register(self._pages[slot][index], keys[index]))
            self.known[slot] = index + 1

    def reserve(self, slot: int, start: int, end: int) -> None:
        """Give a slot private pages for columns start … end - 1, which will be written. Shared pages are copied.

        Raises OutOfPagesError if too few pages are free or evictable. Nothing has changed then.
        """
        if slot == self.slots:  # padding
            return
        pages, first, last = self._pages[slot], start // self.page_size, -(-end // self.page_size)
        if last <= len(pages) and self.allocator.are_private(pages[first:last]):
            return  # as in most steps
        written = range(first, min(last, len(pages)))
        shared = [index for index in written if self.allocator.holders(pages[index]) > 1]
        new = range(len(pages), last)
        if len(shared) + len(new) > self.allocator.available:
            raise OutOfPagesError(
                f"{len(shared) + len(new)} KV pages are needed, but of {self.allocator.pages} only "
                f"{self.allocator.available} are free"
            )
        for index in shared:
            self._copy_page(slot, index, keep=index * self.page_size < start)
        for index in written:
            self.allocator.forget(pages[index])
        self.known[slot] = min(self.known[slot], first)
        for index in new:
            pages.append(self.allocator.allocate())
            self._write(slot, index, pages[index])

    def fork(self, source: int, target: int, end: int) -> None:
        """Let the target have the source's first `end` columns, by reference."""
        self.clear(target)
        pages = self._pages[target]
        for index, page in enumerate(self._pages[source][: -(-end // self.page_size)]):
            self.allocator.share(page)
            pages.append(page)
            self._write(target, index, page)

    def held_pages(self, slot: int) -> int:
        """Return the number of pages that a slot holds."""
        return len(self._pages[slot])

    def released_pages(self, slots: Iterable[int]) -> set[int]:
        """Return the pages that nobody would hold if these slots were given back."""
        counts = Counter(page for slot in slots for page in self._pages[slot])
        return {page for page, count in counts.items() if self.allocator.holders(page) == count}

    def are_held(self, keys: Sequence[bytes], count: int, released: Container[int] = ()) -> bool:
        """Return whether slots hold the first `count` pages of a text, at least one.

        Who holds a page holds those before it. So a few are tried first, ever farther apart, and mostly tell a no.

        keys: the text's, of which few more than twice those that are held are computed. released: pages to leave out.
        """
        samples = (min(1 << power, count) - 1 for power in range(count.bit_length() + 1))
        pages = map(self.allocator.find, map(keys.__getitem__, chain(samples, range(count))))
        return all(page is not None and self.allocator.holders(page) and page not in released for page in pages)

    def page(self, slot: int, column: int) -> int:
        """Return the page of a slot's column; 0: none."""
        return int(self._entries[slot, column // self.page_size])

    def pop_entries(self) -> list[tuple[int, int, int]]:
        """Return the entries written since the last call: slot, index, page."""
        entries = [(slot, index, int(self._entries[slot, index])) for slot, index in self._written]
        self._written.clear()
        return entries

    def pop_copies(self) -> list[tuple[int, int]]:
        """Return which pages to copy before the next forward, as pairs of target and source."""
        copies, self._copies = list(self._copies.items()), {}
        return copies

    def put_back(self, entries: Sequence[tuple[int, int, int]], copies: Sequence[tuple[int, int]]) -> None:
        """Take back what was popped last, because it could not be sent."""
        self._written |= {(slot, index): None for slot, index, _ in entries}
        self._copies |= dict(copies)

    def _hold(self, slot: int, index: int, page: int) -> None:
        """Let a slot hold a known page at an index, in place of its own if it has one there."""
        pages = self._pages[slot]
        if index == len(pages):
            pages.append(0)
        if pages[index] == page:
            return
        self.allocator.share(page)
        if pages[index]:
            self.allocator.release(pages[index])
        pages[index] = page
        self._write(slot, index, page)

    def _copy_page(self, slot: int, index: int, *, keep: bool) -> None:
        """Replace a shared page by a private one. keep: with the same content."""
        pages = self._pages[slot]
        source, target = pages[index], self.allocator.allocate()
        self.allocator.release(source)
        pages[index] = target
        self._write(slot, index, target)
        self._copies.pop(target, None)
        if keep:
            self._copies[target] = self._copies.get(source, source)

    def _write(self, slot: int, index: int, page: int) -> None:
        self._entries[slot, index] = page
        self._written[slot, index] = None
