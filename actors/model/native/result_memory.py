"""Memory for the results of recorded calls."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


class ResultMemory:
    """Blocks of memory. Other results get a block when nothing holds it, so a recording takes little."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes, a power of two
        self._used: dict[int, Tensor] = {}  # by address
        self._holders: Counter[int] = Counter()  # by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory that belongs to whoever holds it."""
        size = torch.Size(shape).numel() * dtype.itemsize
        rounded = 1 << max(size - 1, 0).bit_length()
        free = self._free[rounded]
        block = free.pop() if free else torch.empty(rounded, dtype=torch.uint8)
        self._used[block.data_ptr()] = block
        return block[:size].view(dtype).view(shape)

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor. Views of the same memory hold it together."""
        self._holders[tensor.untyped_storage().data_ptr()] += 1

    def drop(self, tensor: Tensor) -> None:
        """Hold it no longer."""
        self._holders[tensor.untyped_storage().data_ptr()] -= 1

    def drop_unheld(self) -> None:
        """Take back what nothing has held, such as copies that an operator made for itself."""
        for address in [address for address in self._used if not self._holders[address]]:
            block = self._used.pop(address)
            self._free[len(block)].append(block)

    def drop_all(self) -> None:
        """Let nothing hold memory, before another recording."""
        self._holders.clear()
        self.drop_unheld()
