"""Lets the loops of one process run side by side, but none of them while a model is loaded.

transformers sets torch's default dtype for all threads while it makes a model: steps of others would compute in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition


class Turnstile:
    """Any number of turns at once, or something alone."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: makes turns that wait for messages return early."""
        self._wake = wake
        self._changed = Condition()
        self._turns = self._waiting = 0  # turns that run; what waits to be alone
        self._is_closed = False  # whether something is alone

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run the block beside other turns."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block, which is no part of a turn, when no turn runs."""
        with self._changed:
            self._waiting += 1
            self._wake()
            self._changed.wait_for(lambda: not self._is_closed and not self._turns)
            self._waiting -= 1
            self._is_closed = True
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()

    @contextmanager
    def alone_in_turn(self) -> Iterator[None]:
        """Run the block, which is a part of a turn, when no other turn runs."""
        self._leave()
        try:
            with self.alone():
                yield
        finally:
            self._enter()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed and not self._waiting)
            self._turns += 1

    def _leave(self) -> None:
        with self._changed:
            self._turns -= 1
            self._changed.notify_all()
