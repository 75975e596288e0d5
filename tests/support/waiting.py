"""Wait for a condition instead of a fixed time."""

import time
from collections.abc import Callable

from actors.replica.in_process import Engine


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Return as soon as the condition holds; fail after `timeout_s`. what: the condition, for the message."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.002)


def wait_until_idle(engine: Engine) -> None:
    """Return once no replica has a request. A drafter or member may learn after its client that a request has ended."""

    def is_idle() -> bool:
        loads = [loop.load() for loop in engine.loops.values()]
        return not any(load.active + load.waiting for load in loads)

    wait_until(is_idle, "replicas without requests")
