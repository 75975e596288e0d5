"""A loop thread's health check finds failed and stuck loops; memory goes back to the system at rest."""

import ctypes
import subprocess
import sys
import threading

import pytest

from actors.loops.thread import IdleMemory, LoopThread
from decoding.errors import UnavailableError
from tests.support.waiting import wait_until


def fails(thread: LoopThread, **limits: float) -> bool:
    try:
        thread.check(**limits)
    except UnavailableError:
        return True
    return False


def test_a_running_loop_is_healthy_and_stops() -> None:
    turns: list[None] = []
    woken = threading.Event()
    thread = LoopThread("loop", lambda: turns.append(None), woken.set)
    thread.start()
    wait_until(lambda: len(turns) > 10, "turns")
    thread.check()
    thread.stop()
    assert woken.is_set()
    assert not thread._thread.is_alive()


def test_an_error_ends_the_loop_and_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    def turn() -> None:
        raise RuntimeError("out of tune")

    thread = LoopThread("viola", turn, lambda: None)
    thread.start()
    wait_until(lambda: fails(thread), "the error")
    with pytest.raises(UnavailableError, match=r"viola.*out of tune") as caught:
        thread.check()
    assert isinstance(caught.value.__cause__, RuntimeError)
    thread.stop()
    assert "out of tune" in capsys.readouterr().err


def test_a_stuck_turn_fails_the_check() -> None:
    release = threading.Event()

    def turn() -> None:
        release.wait(20)

    thread = LoopThread("loop", turn, release.set)
    thread.start()
    wait_until(lambda: fails(thread, max_silence_s=0.05), "silence")
    thread.check(max_silence_s=60)
    thread.stop()


def test_patience_grows_with_the_usual_turn() -> None:
    thread = LoopThread("loop", lambda: None, lambda: None)
    quick_s = thread.patience_s
    thread.usual_turn_s = 0.5 * quick_s
    assert quick_s < thread.patience_s < 60
    thread.usual_turn_s = 100.0
    assert thread.patience_s == 60


def test_prepare_runs_in_the_loops_thread_and_its_error_reaches_the_caller() -> None:
    threads: list[threading.Thread] = []
    thread = LoopThread("loop", lambda: None, lambda: None, lambda: threads.append(threading.current_thread()))
    thread.start()
    thread.stop()
    assert threads == [thread._thread]

    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        LoopThread("loop", lambda: None, lambda: None, fail).start()


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


def test_what_a_start_freed_is_given_back_at_once() -> None:
    def trim() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        IdleMemory(trim, period_s=1e6).run()


HOLES = """
import ctypes
from actors.loops.thread import IdleMemory

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
