"""Memory of this process."""

import ctypes
import resource
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


def native_bytes() -> int:
    """Return the bytes that this process has allocated from glibc and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
