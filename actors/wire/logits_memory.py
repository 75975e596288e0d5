"""Memory that a leader shares with a member of its node, for logits: they need not pass through a socket.

The leader makes an anonymous file and reads nothing else; the member writes into what the leader names over the
encrypted link, if it finds it, which it does on the same node only. No name appears in a file system: the memory is
free once neither process has it. Linux only; elsewhere `offer` returns None, and logits travel as bytes.
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

_PREFIX = "consort-"  # so that nobody can make a member write into another program's files


class SharedOffer(msgspec.Struct, frozen=True):
    """Where the member finds the leader's memory."""

    pid: int
    descriptor: int
    name: str  # not to be guessed: a process of another node may have the same numbers
    size: int  # bytes


class SharedLogits:
    """One member's answers to one request, each of which overwrites the one before."""

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        """descriptor: by which a member finds the memory, until it is withdrawn."""
        self._memory, self._descriptor = memory, descriptor

    def withdraw(self) -> None:
        """The request has ended. What was read stays valid for as long as it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, logits: Tensor) -> bool:
        """logits: [N, V] of any float type, on any device. False if they don't fit."""
        if logits.nbytes > len(self._memory):
            return False
        self._view(logits.dtype, logits.numel()).view(logits.shape).copy_(logits)
        return True

    def read(self, dtype: torch.dtype, positions: int, vocab_size: int) -> Tensor:
        """[N, V] as last written, without a copy; raises ValueError for more than there is room for."""
        count = positions * vocab_size
        if min(positions, vocab_size) < 1 or count * dtype.itemsize > len(self._memory):
            raise ValueError(f"{positions} positions of {vocab_size} shared logits are more than there is room for")
        return self._view(dtype, count).view(positions, vocab_size)

    def _view(self, dtype: torch.dtype, count: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=count)


def offer(size: int) -> tuple[SharedLogits, SharedOffer] | None:
    """Memory of so many bytes, to be withdrawn, and what to tell the member; None where the system has none."""
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
    """The leader's memory, None if this process can't see it: then it runs on another node, or as another user."""
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
