"""Objects in child processes: called, paused and ended."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import Child, Local


def three() -> list[int]:
    return [3, 1, 2]


@pytest.fixture
def child() -> Iterator[Child[list[int]]]:
    with Child(three, threads=1) as child:
        yield child


def state(pid: int) -> str:
    """Return the state of a process: R, S, T (stopped), …"""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_methods_run_in_the_child(child: Child[list[int]]) -> None:
    child.call(list.append, 4)
    child.call(list.sort, reverse=True)
    assert child.call(list.copy) == [4, 3, 2, 1]


def test_errors_cross_over_and_the_child_goes_on(child: Child[list[int]]) -> None:
    with pytest.raises(ValueError, match="not in list"):
        child.call(list.index, 5)
    assert child.call(list.index, 2) == 2


def test_a_paused_child_is_stopped_until_resumed(child: Child[list[int]]) -> None:
    pid = child.pid
    child.pause()
    end_s = time.monotonic() + 5
    while state(pid) != "T" and time.monotonic() < end_s:
        time.sleep(0.01)
    assert state(pid) == "T"
    child.resume()
    assert child.call(list.copy) == [3, 1, 2]


def test_a_paused_child_ends_with_its_block() -> None:
    with Child(three, threads=1) as child:
        child.pause()
    assert not Path(f"/proc/{child.pid}").exists()


def test_children_get_their_threads_and_leave_our_environment() -> None:
    before = dict(os.environ)
    with Child(three, threads=3) as child:
        assert child.call(environment, "OMP_NUM_THREADS") == "3"
    assert dict(os.environ) == before


def environment(held: object, name: str) -> str | None:
    return os.environ.get(name)


def test_a_local_object_is_called_directly() -> None:
    assert Local([1, 2]).call(list.index, 2) == 1
