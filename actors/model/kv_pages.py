"""The KV cache in pages. A slot is a line of the page tables: the pages that hold the columns of one row's text.

Rollback is free: columns beyond a row's length are written again before they are read. A free slot keeps its text until
it is taken, so a request with the same prefix need not compute that again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on

LEAST_SHARED = 16  # tokens; a shorter common prefix is not reused


class KVPages:
    """Keys and values of all layers in pages, the page tables, and the free slots.

    Column c of slot s is in page `tables[s, c // page_size]`, at offset c % page_size. Page 0 and the last slot are
    never given out: padding is written there.
    """

    def __init__(self, *, slots: int, capacity: int, page_size: int = 16) -> None:
        self.slots, self.capacity, self.page_size = slots, capacity, page_size
        self.dtype: torch.dtype | None = None  # the pages'; None: that of keys and values. Set it before the first call
        # By module: keys [pages, kv_heads, head_dim, page_size], values [pages, kv_heads, page_size, head_dim]
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}
        per_slot = math.ceil(capacity / page_size)
        self.pages = 1 + slots * per_slot
        self.tables = torch.zeros(slots + 1, per_slot, dtype=torch.int32)  # [slots + 1, P]
        self.tables[:slots] = torch.arange(1, self.pages, dtype=torch.int32).view(slots, per_slot)
        self._mirrors: dict[torch.device, Tensor] = {self.tables.device: self.tables}
        self._free: dict[int, Sequence[int]] = dict.fromkeys(range(slots), ())  # their texts; the longest free first

    def tables_on(self, device: torch.device) -> Tensor:
        """Return the page tables on a device, always at the same address: [slots + 1, P] int32."""
        if device not in self._mirrors:
            self._mirrors[device] = self.tables.to(device)
        return self._mirrors[device]

    def add_layer(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
        """Allocate the pages of an attention module. key, value: [1, kv_heads, N, head_dim], examples of its states."""
        shapes = (key.shape[3], self.page_size), (self.page_size, value.shape[3])
        keys, values = (
            states.new_zeros(self.pages, states.shape[1], *shape, dtype=self.dtype)
            for states, shape in zip((key, value), shapes, strict=True)
        )
        self.layers[module] = keys, values

    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to its columns from `target` on, in every layer."""
        self._copy(slot, source, slot, range(target, target + len(source)))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the columns start … end - 1 of one slot to another, in every layer."""
        self._copy(source, range(start, end), target, range(start, end))

    @torch.inference_mode()
    def _copy(self, source: int, source_columns: Sequence[int], target: int, target_columns: Sequence[int]) -> None:
        for device in {keys.device for keys, _ in self.layers.values()}:
            pages, offsets = self._locate(source, source_columns, device)
            target_pages, target_offsets = self._locate(target, target_columns, device)
            for keys, values in self.layers.values():
                if keys.device == device:
                    keys[target_pages, :, :, target_offsets] = keys[pages, :, :, offsets]
                    values[target_pages, :, target_offsets] = values[pages, :, offsets]

    def _locate(self, slot: int, columns: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the pages of a slot's columns and the offsets in them, [n] int64 each."""
        table = self.tables[slot].tolist()
        pages = [table[column // self.page_size] for column in columns]
        offsets = [column % self.page_size for column in columns]
        return tensor_on(device, pages, torch.int64), tensor_on(device, offsets, torch.int64)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, text: Sequence[int] = ()) -> tuple[int, int]:
        """Take a free slot; return it and how many of the text's first tokens it has. The caller checks `free` first.

        The slot with the longest common prefix is taken, if that is worth reusing. Else the lowest empty slot, so that
        occupied slots stay close together. Else the slot that has been free for longest.
        """
        shared = {slot: common_prefix(cached, text) for slot, cached in self._free.items()}
        slot = max(shared, key=shared.__getitem__)
        if shared[slot] < LEAST_SHARED:
            empty = [slot for slot, cached in self._free.items() if not cached]
            slot = min(empty) if empty else next(iter(self._free))
            shared[slot] = 0
        del self._free[slot]
        return slot, shared[slot]

    def give_back(self, slot: int, text: Sequence[int] = ()) -> None:
        """Make the slot free. text: what its first columns contain."""
        self._free[slot] = text


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix, in tokens."""
    low, high = 0, min(len(first), len(second))  # bounds of the length
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
