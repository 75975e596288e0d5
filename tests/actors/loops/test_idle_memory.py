"""Memory goes back to the system when a process rests after work, and never while it works."""

import ctypes
import subprocess
import sys

import pytest

from actors.loops.idle_memory import IdleMemory


def test_it_is_given_back_once_after_work() -> None:
    calls: list[float] = []
    used_s = 0.0
    memory = IdleMemory(lambda: calls.append(used_s), period_s=5)
    for spent_s in (0.1, 4.0, 0.6, 0.4, 0.4, 0.1, 5.0, 5.0, 0.4, 0.2):
        used_s += spent_s
        memory.check(used_s)
    assert calls == pytest.approx([5.1, 16.0])


def test_little_work_adds_up() -> None:
    calls: list[int] = []
    memory = IdleMemory(lambda: calls.append(1), period_s=5)
    for period in range(1, 101):
        memory.check(0.125 * period)
    assert len(calls) == 12  # after each second of it


HOLES = """
import ctypes
from actors.loops.idle_memory import IdleMemory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

pieces = [bytearray(60_000) for _ in range(4000)]  # too small for mappings of their own
last = bytearray(60_000)
del pieces
before = resident()
IdleMemory(lambda: ctypes.CDLL(None).malloc_trim(0), period_s=100).check(2.0)
print(before, resident(), len(last))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_what_lies_below_a_piece_in_use_goes_back() -> None:
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    before, after, _ = map(int, run.stdout.split())
    assert before - after > 150  # MiB of 229
