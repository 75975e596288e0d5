"""The KV cache as preallocated slots: a slot is a row of every layer's cache that belongs to one request.

Rollback is free: positions at or beyond a row's length are never read before they are written again. This is the
only module that knows transformers' cache interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(slots=True, eq=False)
class SlotWindow:
    """Which part of the cache one forward call reads and writes; shared by all layers, replaced before each call."""

    rows: slice | Tensor  # the slots of the batch: consecutive ones, or [B] int64
    written: Tensor  # [B * Q] int64, slot * capacity + position of every query token
    length: int  # columns to read


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, capacity, heads, head_dim], allocated at the first write."""

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__()
        self._slots, self._capacity = slots, capacity
        self.window: SlotWindow

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """key_states, value_states: [B, heads, Q, head_dim]."""
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self._slots, self._capacity, states.shape[1], states.shape[3])
            setattr(self, name, states.new_zeros(shape))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, Q, head_dim] in place; return the window, [B, heads, length, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._exchange(self.keys, key_states), self._exchange(self.values, value_states)

    def _exchange(self, store: Tensor, states: Tensor) -> Tensor:
        window = self.window
        store.flatten(0, 1).index_copy_(0, window.written, states.transpose(1, 2).flatten(0, 1))
        columns = store[:, : window.length]
        rows = columns[window.rows] if isinstance(window.rows, slice) else columns.index_select(0, window.rows)
        return rows.transpose(1, 2)

    def move(self, slot: int, source: list[int], target: int) -> None:
        """Copy the columns `source` of a slot to the columns from `target` on."""
        for store in (self.keys, self.values):
            assert store is not None
            store[slot, target : target + len(source)] = store[slot, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.length, 0

    def get_seq_length(self) -> int:
        return self.window.length

    def get_max_length(self) -> int:
        return self._capacity

    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """All layers, and the list of free slots."""

    def __init__(self, *, layers: int, slots: int, capacity: int) -> None:
        self._slot_layers = [SlotLayer(slots, capacity) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))
        self.slots, self.capacity = slots, capacity
        self._free = list(range(slots))

    def look_at(self, window: SlotWindow) -> None:
        for layer in self._slot_layers:
            layer.window = window

    @torch.inference_mode()
    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        """Copy the columns `source` of a slot to the columns from `target` on, in every layer."""
        for layer in self._slot_layers:
            layer.move(slot, list(source), target)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot, so that occupied slots stay close together. The caller checks `free` first."""
        self._free.sort()
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


def select_rows(slots: list[int], device: torch.device) -> slice | Tensor:
    """Consecutive ascending slots as a slice, which reads the cache without a copy; others as an index tensor."""
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, dtype=torch.int64, device=device)
