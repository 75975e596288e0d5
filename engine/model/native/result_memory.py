"""Memory for the results of recorded calls."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


class ResultMemory:
    """Blocks of memory. A block that nothing holds is given to later results, so recordings need little."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes, a power of two
        self._used: dict[int, Tensor] = {}  # by address
        self._holders: Counter[int] = Counter()  # by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, whose memory `drop_unheld` takes back unless it is held."""
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
        """Undo one `hold`."""
        self._holders[tensor.untyped_storage().data_ptr()] -= 1

    def drop_unheld(self) -> None:
        """Take back what nothing holds, such as copies that an operator made for itself."""
        for address in [address for address in self._used if not self._holders[address]]:
            block = self._used.pop(address)
            self._free[len(block)].append(block)

    def drop_all(self) -> None:
        """Take back all memory, before another recording."""
        self._holders.clear()
        self.drop_unheld()
