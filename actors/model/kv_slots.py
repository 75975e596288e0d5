"""The KV cache as preallocated slots: a slot is a row of every layer's cache that belongs to one request.

Rollback is free: positions at or beyond a row's length are never read before they are written again. What a slot held
when it became free stays there until it is taken, so a text that begins in the same way need not be computed again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.sampling.transfer import tensor_on

LEAST_SHARED = 16  # tokens that are worth looking for a slot that holds them, or copying them


class SlotCache:
    """Keys and values of all layers, [slots + 1, kv_heads, capacity, head_dim] each, and the list of free slots.

    The last slot is never taken: padding is written there.
    """

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.dtype: torch.dtype | None = None  # of the slots, if not that of keys and values; set before the first call
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}  # keys and values by attention module
        self._free: dict[int, Sequence[int]] = dict.fromkeys(range(slots), ())  # texts; the longest free first

    def add_layer(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
        """Allocate the slots of an attention module's layer. key, value: [1, kv_heads, N, head_dim], any of its own."""
        self.layers[module] = self._allocate(key), self._allocate(value)

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.slots + 1, states.shape[1], self.capacity, states.shape[3], dtype=self.dtype)

    @torch.inference_mode()
    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to the columns from `target` on, in every layer."""
        columns = {
            device: tensor_on(device, source, torch.int64)
            for device in {keys.device for keys, _ in self.layers.values()}
        }
        for stores in self.layers.values():
            for store in stores:
                moved = store[slot].index_select(1, columns[store.device])
                store[slot, :, target : target + len(source)] = moved

    @property
    def free(self) -> int:
        return len(self._free)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the columns start … end - 1 of one slot to another, in every layer."""
        with torch.inference_mode():
            for stores in self.layers.values():
                for store in stores:
                    store[target, :, start:end] = store[source, :, start:end]

    def take(self, text: Sequence[int] = ()) -> tuple[int, int]:
        """A free slot and how many of the text's first tokens it holds. The caller checks `free` first.

        The one that shares most with the text; else the lowest that holds nothing, so that occupied slots stay close
        together; else the one that has been free for longest.
        """
        shared = {slot: common_prefix(held, text) for slot, held in self._free.items()}
        slot = max(shared, key=shared.__getitem__)
        if shared[slot] < LEAST_SHARED:
            empty = [slot for slot, held in self._free.items() if not held]
            slot = min(empty) if empty else next(iter(self._free))
            shared[slot] = 0
        del self._free[slot]
        return slot, shared[slot]

    def give_back(self, slot: int, text: Sequence[int] = ()) -> None:
        """The slot is free; its first columns hold the text."""
        self._free[slot] = text


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other))  # at least, at most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
