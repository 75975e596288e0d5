"""The host's time is exposed while the device has nothing to do: before a forward, and after the host has read."""

import time
from collections.abc import Callable

import torch

from benchmarks.step_budget.host import HostClock, fake_results

_BUSY_S = 0.02


def _work() -> None:
    end_s = time.thread_time() + _BUSY_S
    while time.thread_time() < end_s:
        pass


def _times(*steps: Callable[[HostClock], object]) -> tuple[float, float]:
    """Run the steps, with work before and after each. Returns the exposed and the whole time, in works."""
    with fake_results():
        with HostClock() as clock:
            _read(clock)  # the first time, torch imports modules
        with HostClock() as clock:
            _work()
            for step in steps:
                step(clock)
                _work()
    return round(clock.exposed_s / _BUSY_S), round(clock.seconds / _BUSY_S)


def _read(_: HostClock) -> object:
    return torch.zeros(3, device="meta").tolist()


def test_all_is_exposed_without_a_forward() -> None:
    assert _times(_read) == (2, 2)


def test_nothing_is_exposed_between_a_forward_and_the_read() -> None:
    assert _times(HostClock.note_forward) == (1, 2)
    assert _times(HostClock.note_forward, _read) == (2, 3)
    assert _times(HostClock.note_forward, lambda _: torch.zeros(3, device="meta") + 1, _read) == (2, 4)
    assert _times(HostClock.note_forward, _read, HostClock.note_forward) == (2, 4)
