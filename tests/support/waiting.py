"""Waits for a condition instead of a fixed time."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Return as soon as the condition holds; fail after `timeout_s`. what: the condition, for the message."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.002)
