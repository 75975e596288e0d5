"""Memory of processes: resident, and allocated by native code."""

import ctypes
import os
from pathlib import Path


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`; sizes in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def rss_bytes(pid: int | None = None) -> int:
    """Return a process's resident memory, with free memory that its allocator keeps. pid: None: this process."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def native_bytes() -> int:
    """Return the bytes that this process has allocated from glibc and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
