"""Costs of a loop's turn by rows and tokens. Must not know how they were measured."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnCosts:
    """Seconds of a turn by rows and tokens per row, interpolated linearly."""

    seconds: Mapping[int, Mapping[int, float]]  # by rows, by tokens of each row

    def __call__(self, rows: int, tokens: int) -> float:
        """Return the seconds of a turn. tokens: of all rows together."""
        per_row = tokens / rows
        return _interpolate(rows, {count: _interpolate(per_row, table) for count, table in self.seconds.items()})


def _interpolate(x: float, table: Mapping[int, float]) -> float:
    """Interpolate between the two nearest points; extrapolate beyond the last one, but not below the first."""
    known = sorted(table)
    if len(known) == 1:
        return table[known[0]]
    right = min(max(bisect_right(known, x), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return table[low] + (table[high] - table[low]) * (max(x, known[0]) - low) / (high - low)
