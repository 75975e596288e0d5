"""Gives memory that was freed back to the system when a process has worked and rests. Knows nothing of its work.

glibc keeps it, in every arena of its threads. Under load that is faster; but what one heavy or hostile minute needed
would stay for ever.
"""

import ctypes
import threading
import time
from collections.abc import Callable

_PERIOD_S = 5.0
_RESTING = 0.1  # processor time / time, up to which a process rests
_WORK_S = 1.0  # processor time after which freeing pays


class IdleMemory:
    """Decides once in a period whether to give memory back."""

    def __init__(self, trim: Callable[[], object], *, period_s: float = _PERIOD_S) -> None:
        self._trim, self._period_s = trim, period_s
        self._last_s = self._trimmed_s = 0.0  # by the process's clock

    def check(self, used_s: float) -> None:
        """Call `trim` if the process has worked since it was called last, and did little in the last period.

        used_s: processor time that the process has used so far.
        """
        rests = used_s - self._last_s <= _RESTING * self._period_s
        self._last_s = used_s
        if rests and used_s - self._trimmed_s >= _WORK_S:
            self._trimmed_s = used_s
            self._trim()

    def run(self) -> None:
        """Check for ever."""
        while True:
            time.sleep(self._period_s)
            self.check(time.process_time())


def return_idle_memory() -> None:
    """Start a thread that does so for this process, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        memory = IdleMemory(lambda: trim(0))
        threading.Thread(target=memory.run, name="idle memory", daemon=True).start()
