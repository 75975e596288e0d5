"""The KV cache as preallocated slots: a slot is a row of every layer's cache that belongs to one request.

Rollback is free: columns beyond a row's length are written again before they are read. A free slot keeps its text until
it is taken, so a request with the same prefix need not compute that again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on

LEAST_SHARED = 16  # tokens; a shorter common prefix is not reused


class OutOfPagesError(Exception):
    """No page is free. The scheduler makes room; no client sees this."""


class SlotCache:
    """Keys and values of all layers, [slots + 1, kv_heads, capacity, head_dim] each, and the free slots.

    The last slot is never taken: padding is written to it.
    """

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.dtype: torch.dtype | None = None  # the slots'; None: that of keys and values. Set it before the first call
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}  # keys and values by attention module
        self._free: dict[int, Sequence[int]] = dict.fromkeys(range(slots), ())  # their texts; the longest free first

    def add_layer(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
        """Allocate the slots of an attention module. key, value: [1, kv_heads, N, head_dim], examples of its states."""
        self.layers[module] = self._allocate(key), self._allocate(value)

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.slots + 1, states.shape[1], self.capacity, states.shape[3], dtype=self.dtype)

    @torch.inference_mode()
    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to its columns from `target` on, in every layer."""
        columns = {
            device: tensor_on(device, source, torch.int64)
            for device in {keys.device for keys, _ in self.layers.values()}
        }
        for stores in self.layers.values():
            for store in stores:
                states = store[slot].index_select(1, columns[store.device])
                store[slot, :, target : target + len(source)] = states

    @property
    def free(self) -> int:
        return len(self._free)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the columns start … end - 1 of one slot to another, in every layer."""
        with torch.inference_mode():
            for stores in self.layers.values():
                for store in stores:
                    store[target, :, start:end] = store[source, :, start:end]

    def reserve(self, slot: int, end: int) -> None:
        """Make room for the slot's columns before `end`; slots of a fixed size have it."""

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
