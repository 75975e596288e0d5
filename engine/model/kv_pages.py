"""Keys and values of all layers in pages, and the page tables that say which page holds which columns of a slot.

Rollback is free: columns beyond a row's length are written again before they are read.
"""

import mmap
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on
from engine.model.page_allocator import PAGE_SIZE
from engine.model.page_tables import PageTables
from engine.model.row_states import RowStates


class KVPages(PageTables):
    """The page tables and their pages: page 0, which is for padding, and those that slots share.

    Column c of slot s is in page `tables[s, c // page_size]`, at offset c % page_size.
    """

    def __init__(self, *, slots: int, capacity: int, pages: int | None = None, page_size: int = PAGE_SIZE) -> None:
        """capacity: the most columns of a slot. pages: for all slots together; None: as many as they can ever need."""
        super().__init__(slots=slots, capacity=capacity, pages=pages, page_size=page_size)
        self.dtype: torch.dtype | None = None  # the pages'; None: that of the states. Set it before the first call
        # by call of attention: keys [pages + 1, kv_heads, head_dim, page_size] and, except for latents, values
        # [pages + 1, kv_heads, page_size, head_dim]
        self.layers: dict[Hashable, tuple[Tensor, ...]] = {}
        self.states: RowStates | None = None  # of layers that carry one; None: none does
        self.state_memory: dict[Hashable, tuple[Tensor, ...]] = {}  # by layer and kind, [cells, …] each
        self._mirrors: dict[torch.device, Tensor] = {self.tables.device: self.tables}

    def carry_states(self, snapshots: int) -> None:
        """Keep states beside pages. snapshots: how many of texts' beginnings. Call it before the first call."""
        self.states = RowStates(self.slots, snapshots, self.page_size)

    def add_state(
        self, layer: Hashable, device: torch.device, *parts: tuple[Sequence[int], torch.dtype]
    ) -> tuple[Tensor, ...]:
        """Allocate what a layer carries. parts: the shape of each part of a cell, and its type."""
        assert self.states is not None
        cells = self.states.cells
        self.state_memory[layer] = tuple(_zeros((cells, *shape), dtype, device) for shape, dtype in parts)
        return self.state_memory[layer]

    @contextmanager
    def losing_states(self, slots: Iterable[int]) -> Iterator[None]:
        """If the forward in the block fails, its slots have no state any more."""
        try:
            yield
        except BaseException:
            if self.states is not None:
                self.states.lose(slots)
            raise

    def can_go_on(self, slot: int, column: int) -> bool:
        """As in `PageTables`."""
        return self.states is None or self.states.can_go_on(slot, column)

    def take(self, keys: Sequence[bytes] = ()) -> tuple[int, int]:
        """As in `PageTables`. A model that carries states goes on only from where there is a snapshot of them."""
        if self.states is None:
            return super().take(keys)
        known = self._known(keys)
        pages = self.states.longest(keys, known)
        slot, held = super().take()
        while held < pages * self.page_size:
            held = super().extend(slot, [keys[index] for index in range(pages)], held)
        self.states.begin(slot, keys, pages, known)
        return slot, held

    def are_held(self, keys: Sequence[bytes], count: int, released: Container[int] = ()) -> bool:
        """As in `PageTables`. With states, pages after the last snapshot don't count: they are written anew."""
        held = super().are_held(keys, count, released)
        return held and (self.states is None or self.states.longest(keys, self._known(keys)) >= count)

    def _known(self, keys: Sequence[bytes]) -> int:
        """Return how many of a text's first pages are cached."""
        return next((index for index, key in enumerate(keys) if not self.is_known(key)), len(keys))

    @property
    def extends(self) -> bool:
        """As in `PageTables`. States are taken over with a slot only."""
        return self.states is None

    def clear(self, slot: int) -> None:
        """Release all pages of a slot, and its state."""
        super().clear(slot)
        if self.states is not None:
            self.states.clear(slot)

    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors that hold keys, values and states."""
        for stores in (*self.layers.values(), *self.state_memory.values()):
            yield from stores

    def forget_texts(self) -> None:
        """Forget the content of all pages that nobody holds, and all snapshots: other weights computed them."""
        self.allocator.forget_unheld()
        if self.states is not None:
            self.states.forget()

    @torch.inference_mode()
    def fork(self, source: int, target: int, end: int) -> None:
        """Let the target have the source's first `end` columns, by reference, and a copy of its state."""
        super().fork(source, target, end)
        if self.states is not None:
            cell = self.states.fork(source, target, end)
            for part in (part for parts in self.state_memory.values() for part in parts):
                part[target] = part[cell]

    def tables_on(self, device: torch.device) -> Tensor:
        """Return the page tables on a device, always at the same address: [slots + 1, P] int32."""
        if device not in self._mirrors:
            self._mirrors[device] = self.tables.to(device)
        return self._mirrors[device]

    @property
    def last_device(self) -> torch.device:
        """The device of the last layer that keeps anything, after a first call."""
        stores = [*self.layers.values(), *self.state_memory.values()]
        return stores[-1][0].device

    def add_layer(self, layer: Hashable, key: Tensor, value: Tensor | None) -> None:
        """Allocate the pages of one call of attention. layer: its key, see `Rows.count_call`.

        key, value: [1, kv_heads, N, head_dim], examples of its states. value: None: values are the beginnings of keys.
        """
        shape, dtype = (self.allocator.pages + 1, key.shape[1]), self.dtype or key.dtype
        keys = _zeros((*shape, key.shape[3], self.page_size), dtype, key.device)
        if value is None:
            self.layers[layer] = (keys,)
        else:
            self.layers[layer] = keys, _zeros((*shape, self.page_size, value.shape[3]), dtype, key.device)

    def prepare_writes(self, extents: Iterable[tuple[int, int, int]]) -> None:
        """Reserve pages for the columns start … end - 1 of slots: slot, start, end. Call it before a forward.

        Raises OutOfPagesError if too few pages are free or evictable.
        """
        self.reserve_all(extents)
        self.flush()

    def reserve_all(self, extents: Iterable[tuple[int, int, int]]) -> None:
        """Do the same, but leave it to the caller to send what changed."""
        for slot, start, end in extents:
            self.reserve(slot, start, end)

    def pop_updates(self, most: int) -> list[tuple[int, int, int]]:
        """Return at most so many new entries of the tables (slot, index, page), which the caller sends to the device.

        The rest is sent, and pages are copied.
        """
        entries, copies = self.pop_entries(), self.pop_copies()
        if copies or len(entries) > most:
            try:
                self.apply(entries[most:], copies)
            except torch.OutOfMemoryError:
                self.put_back(entries, copies)
                raise
        return entries[:most]

    def flush(self) -> None:
        """Copy the pages that are to be copied, and send new entries of the tables to the devices."""
        self.pop_updates(0)

    @torch.inference_mode()
    def apply(self, entries: Sequence[tuple[int, int, int]], copies: Sequence[tuple[int, int]]) -> None:
        """Write entries of the tables (slot, index, page), on every device, and copy pages (target, source)."""
        for device, table in self._mirrors.items() if entries else ():
            slots, indices, pages = tensor_on(device, entries, torch.int64).unbind(1)
            table[slots, indices] = pages.int()
        for device in self._devices() if copies else ():
            targets, sources = tensor_on(device, copies, torch.int64).unbind(1)
            for store in (store for stores in self.layers.values() for store in stores if store.device == device):
                store[targets] = store[sources]

    @torch.inference_mode()
    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to its columns from `target` on, in every layer. They must be its own."""
        self.flush()
        for device in self._devices():
            pages, offsets = self._locate(slot, source, device)
            target_pages, target_offsets = self._locate(slot, range(target, target + len(source)), device)
            for keys, *values in self.layers.values():
                if keys.device == device:
                    keys[target_pages, :, :, target_offsets] = keys[pages, :, :, offsets]
                    for store in values:
                        store[target_pages, :, target_offsets] = store[pages, :, offsets]

    def _locate(self, slot: int, columns: Sequence[int], device: torch.device) -> Tensor:
        """Return the pages of a slot's columns and the offsets in them, [2, n] int64."""
        pages = [self.page(slot, column) for column in columns]
        return tensor_on(device, [pages, [column % self.page_size for column in columns]], torch.int64)

    def _devices(self) -> set[torch.device]:
        return {keys.device for keys, *_ in self.layers.values()}


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros.

    On a CPU the memory is mapped anonymously. It is zero without being written, so a page of the cache takes no memory
    before it is used, and it is aligned for any vector instruction. `torch.zeros` may write to all of its memory.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
