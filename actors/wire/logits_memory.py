"""Shared memory through which a member passes logits to a leader on the same node.

The leader creates the memory and names it to the member over the encrypted link. The member writes into it if it
runs on the same node. Where there is no shared memory `offer` returns None, and logits are sent as bytes.
"""

import mmap
import os

import torch
from torch import Tensor

from actors.wire.shared_memory import SharedOffer, attach, create


class SharedLogits:
    """Memory for one member's replies to one request. Each reply overwrites the one before."""

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        """descriptor: the leader's, by which a member finds the memory until it is withdrawn."""
        self._memory, self._descriptor = memory, descriptor

    def withdraw(self) -> None:
        """Close the descriptor when the request has ended. Tensors that were read stay valid."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, logits: Tensor) -> bool:
        """Write logits, [N, V] of any float type, on any device. Return False if they don't fit."""
        if logits.nbytes > len(self._memory):
            return False
        self._view(logits.dtype, logits.numel()).view(logits.shape).copy_(logits)
        return True

    def read(self, dtype: torch.dtype, positions: int, vocab_size: int) -> Tensor:
        """Return the logits last written, [N, V], without a copy. Raises ValueError for sizes that don't fit."""
        count = positions * vocab_size
        if min(positions, vocab_size) < 1 or count * dtype.itemsize > len(self._memory):
            raise ValueError(f"{positions} positions of {vocab_size} shared logits are more than there is room for")
        return self._view(dtype, count).view(positions, vocab_size)

    def _view(self, dtype: torch.dtype, count: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=count)


def offer(size: int) -> tuple[SharedLogits, SharedOffer] | None:
    """Create shared memory. Return it with the offer to send; None if the system has no such memory. size: bytes."""
    created = create(size)
    if created is None:
        return None
    memory, offered = created
    return SharedLogits(memory, offered.descriptor), offered


def accept(offered: SharedOffer) -> SharedLogits | None:
    """Open the leader's memory. Return None if it is out of reach: on another node, or of another user."""
    memory = attach(offered)
    return None if memory is None else SharedLogits(memory)
