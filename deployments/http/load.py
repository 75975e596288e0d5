"""How fast requests end lately, from which follows when a refused client should come back."""

import math

_SMOOTHING = 0.2
_LONGEST_RETRY_S = 60


class Load:
    """Of one coordinator. Times are the event loop's."""

    def __init__(self) -> None:
        self._interval_s: float | None = None  # between two ends, smoothed
        self._last_end_s: float | None = None

    def ended(self, now_s: float) -> None:
        """A request has ended."""
        if self._last_end_s is not None:
            interval_s = now_s - self._last_end_s
            before_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = before_s + _SMOOTHING * (interval_s - before_s)
        self._last_end_s = now_s

    def retry_after_s(self, now_s: float, requests: int) -> int:
        """When it is worth trying again: once half of the requests at hand should have ended, from 1 to 60 s."""
        if self._interval_s is None or self._last_end_s is None:
            return 1
        interval_s = max(self._interval_s, now_s - self._last_end_s)
        return min(max(1, math.ceil(interval_s * requests / 2)), _LONGEST_RETRY_S)
