"""Online calibration of a drafter: the probabilities that its best, second and third token are the target's.

Under shared noise the gap between the two best noisy scores predicts this far better than the token's probability
(docs/experiments.md). Knows nothing of models or rows.
"""

import math
from bisect import bisect
from collections.abc import Sequence

RANKS = 3  # ranks that are usually counted: the best token, the second, the third
_GAPS = (0.25, 0.5, 1.0, 1.5, 2.25, 3.0, 4.5)  # bounds between the bins
_DECAY = 0.998  # weight of an observation after the next one in its bin
_PRIOR_TOKENS = 8.0  # the prior counts as this many observations
_MIN_PROBABILITY = 1e-4
_PRIOR_SHARES = (0.4, 0.2)  # shares of ranks 1 and 2 in the probability that the best token is wrong
_PRIOR_FALL = 0.5  # the share of each further rank, relative to the one before


class RankCalibration:
    """Probabilities by gap and rank. Gap: the best noisy score less the second, at least 0. Rank 0 is the best."""

    def __init__(self, ranks: int = RANKS) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_GAPS), (*_GAPS, _GAPS[-1] + 2), strict=True)]
        self._counts = [[_PRIOR_TOKENS * probability for probability in _prior(gap, ranks)] for gap in middles]
        self._observed = [_PRIOR_TOKENS] * len(middles)

    def probabilities(self, gap: float) -> list[float]:
        """Return the probability that the token of each rank is the target's, [ranks]."""
        index = bisect(_GAPS, gap)
        return [max(count / self._observed[index], _MIN_PROBABILITY) for count in self._counts[index]]

    def note(self, gap: float, rank: int | None) -> None:
        """Count a token of the target. rank: the drafter's rank of it; None: beyond the counted ranks."""
        index = bisect(_GAPS, gap)
        self._counts[index] = [_DECAY * count + (r == rank) for r, count in enumerate(self._counts[index])]
        self._observed[index] = _DECAY * self._observed[index] + 1


def _prior(gap: float, ranks: int) -> Sequence[float]:
    wrong = 0.65 * math.exp(-gap / 2)
    shares = [*_PRIOR_SHARES, *(_PRIOR_SHARES[-1] * _PRIOR_FALL ** (rank + 1) for rank in range(ranks - RANKS))]
    return (1 - wrong, *(wrong * share for share in shares[: ranks - 1]))
