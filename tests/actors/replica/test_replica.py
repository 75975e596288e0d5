"""A draining replica finishes its requests in time."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.replica import replica as module
from actors.replica.replica import Replica
from actors.wire.messages import Report


class Draining:
    """A replica without a model, whose requests end after a few polls."""

    def __init__(self) -> None:
        self.left = 1
        self.stopped = 0
        self.polls = 0
        self.replica = cast(Any, Replica.__new__(Replica))
        self.replica._loop = SimpleNamespace(load=self._load)
        self.replica._thread = SimpleNamespace(stop=self._stop)
        self.replica._link = SimpleNamespace(close=lambda: None)
        self.replica._adaptation = None

    def _load(self) -> Report:
        self.polls += 1
        if self.polls > 5:
            self.left = 0
        return Report(active=self.left, waiting=0, slots=4, request_ids=[])

    def _stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> Draining:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    monkeypatch.setattr(module, "_NOTICE_S", 0.01)
    return Draining()


def test_running_requests_end_first(draining: Draining) -> None:
    draining.replica.drain(timeout_s=10)
    assert (draining.left, draining.stopped) == (0, 1)


def test_draining_ends_at_the_time_out(draining: Draining) -> None:
    draining.polls = -(10**9)
    began_s = time.monotonic()
    draining.replica.drain(timeout_s=0.1)
    assert 0.1 <= time.monotonic() - began_s < 5
    assert (draining.left, draining.stopped) == (1, 1)


def test_an_idle_replica_waits_for_its_coordinators(draining: Draining, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinators that don't know yet would lose what they send."""
    monkeypatch.setattr(module, "_NOTICE_S", 0.1)
    draining.left = 0
    began_s = time.monotonic()
    draining.replica.drain(timeout_s=10)
    assert time.monotonic() - began_s >= 0.1
