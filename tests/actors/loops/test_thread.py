"""A loop thread's health check distinguishes healthy, failed and stuck loops."""

import threading

import pytest

from actors.loops.thread import LoopThread
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
