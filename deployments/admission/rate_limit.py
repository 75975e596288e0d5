"""How much may begin in a minute. Knows no requests and no clock."""


class RateLimit:
    """A budget that fills evenly, up to a minute's worth (a token bucket)."""

    def __init__(self, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._left, self._at_s = self._capacity, 0.0

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until `amount` may be taken; 0: now. More than a minute's worth goes once it is full."""
        missing = min(amount, self._capacity) - self._filled(now_s)
        return max(missing, 0.0) * 60 / self._capacity

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, or give it back if it is negative."""
        self._left, self._at_s = min(self._filled(now_s) - amount, self._capacity), now_s

    def _filled(self, now_s: float) -> float:
        return min(self._left + (now_s - self._at_s) * self._capacity / 60, self._capacity)
