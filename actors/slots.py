"""The KV cache as preallocated slots: a slot is a row of every layer's cache that belongs to one request.

Rollback is free: positions at or beyond a row's length are never read before they are written again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of all layers, [slots + 1, kv_heads, capacity, head_dim] each, and the list of free slots.

    The last slot is never taken: padding is written there.
    """

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.layers: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}  # keys and values by attention module
        self._free = list(range(slots))

    def add_layer(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> None:
        """Allocate the slots of an attention module's layer. key, value: [1, kv_heads, N, head_dim], any of its own."""
        self.layers[module] = self._allocate(key), self._allocate(value)

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.slots + 1, states.shape[1], self.capacity, states.shape[3])

    @torch.inference_mode()
    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to the columns from `target` on, in every layer."""
        for stores in self.layers.values():
            for store in stores:
                store[slot, :, target : target + len(source)] = store[slot, :, list(source)]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot, so that occupied slots stay close together. The caller checks `free` first."""
        self._free.sort()
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
