"""How much memory processes have, as the system sees it, and how much of it their native code uses."""

import ctypes
import os
from pathlib import Path


class _Mallinfo2(ctypes.Structure):
    """glibc's; sizes in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def rss_bytes(pid: int | None = None) -> int:
    """What a process has in memory, with what its allocator keeps for later. pid: None is this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def native_bytes() -> int:
    """What this process has from glibc's allocator and has not given back to it."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)
