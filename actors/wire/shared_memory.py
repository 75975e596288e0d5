"""Anonymous memory that processes of one user on one node share. Linux only: elsewhere there is none.

One process creates the memory and tells others its name. It is freed once all have closed it, also when they die.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from pathlib import Path

import msgspec

_PREFIX = "consort-"  # so that no peer can make a process write into another program's files


class SharedOffer(msgspec.Struct, frozen=True):
    """How other processes find the memory."""

    pid: int
    descriptor: int
    name: str  # random: a process on another node may have the same pid and descriptor
    size: int  # bytes

    @property
    def is_within_reach(self) -> bool:
        """Whether the memory is on this node, of this user, and its creator still lives."""
        with contextlib.suppress(OSError, ValueError, OverflowError):
            return str(self.path.readlink()) == f"/memfd:{_PREFIX}{self.name} (deleted)"
        return False

    @property
    def path(self) -> Path:
        """Where the creator has it open."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")


def create(size: int) -> tuple[mmap.mmap, SharedOffer] | None:
    """Create shared memory, which others find until its descriptor is closed. size: bytes.

    Returns:
        The memory and how to find it; None if the system has no such memory.
    """
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
    return memory, SharedOffer(os.getpid(), descriptor, name, size)


def attach(offered: SharedOffer) -> mmap.mmap | None:
    """Open another process's memory. Return None if it is out of reach: on another node, or of another user."""
    if sys.platform != "linux" or not offered.is_within_reach:
        return None
    with contextlib.suppress(OSError, ValueError, OverflowError):
        descriptor = os.open(offered.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fixed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            return mmap.mmap(descriptor, offered.size) if fixed else None
        finally:
            os.close(descriptor)
    return None
