"""What a loop's turn costs, by its rows and tokens. Knows nothing of where the times are from."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnCosts:
    """Seconds of a turn, by rows and tokens per row; between what was measured, straight lines."""

    seconds: Mapping[int, Mapping[int, float]]  # by rows, by tokens of each row

    def __call__(self, rows: int, tokens: int) -> float:
        """Of so many rows with so many tokens in all."""
        per_row = tokens / rows
        return _between(rows, {count: _between(per_row, table) for count, table in self.seconds.items()})


def _between(at: float, table: Mapping[int, float]) -> float:
    """On the line through the two nearest points; beyond the last, on the line through the last two."""
    known = sorted(table)
    if len(known) == 1:
        return table[known[0]]
    right = min(max(bisect_right(known, at), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return table[low] + (table[high] - table[low]) * (max(at, known[0]) - low) / (high - low)
