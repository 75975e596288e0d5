"""Shared memory through which a member passes logits to a leader on the same node.

The leader creates an anonymous file and names it to the member over the encrypted link. The member writes into it if it
runs on the same node. The memory is freed once both processes have closed it. Linux only: elsewhere `offer` returns
None, and logits are sent as bytes.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_PREFIX = "consort-"  # so that no peer can make a member write into another program's files


class SharedOffer(msgspec.Struct, frozen=True):
    """How a member finds the leader's memory."""

    pid: int
    descriptor: int
    name: str  # random: a process on another node may have the same pid and descriptor
    size: int  # bytes


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
    if sys.platform != "linux":
        return None
    name = secrets.token_hex(16)
    try:
        descriptor = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    return SharedLogits(memory, descriptor), SharedOffer(os.getpid(), descriptor, name, size)


def accept(offered: SharedOffer) -> SharedLogits | None:
    """Open the leader's memory. Return None if it is out of reach: on another node, or of another user."""
    if sys.platform != "linux":
        return None
    path = Path(f"/proc/{offered.pid}/fd/{offered.descriptor}")
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if str(path.readlink()) == f"/memfd:{_PREFIX}{offered.name} (deleted)":
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fixed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
                return SharedLogits(mmap.mmap(descriptor, offered.size)) if fixed else None
            finally:
                os.close(descriptor)
    return None
