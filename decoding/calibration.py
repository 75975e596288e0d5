"""How far to trust a drafter: the chance that its best, second, … token is the target's, by how clear its choice was.

Measured online. Under shared noise the distance between its two best noisy scores tells far more than the
probability of the token (docs/experiments.md). Knows nothing of models or rows.
"""

import math
from bisect import bisect
from collections.abc import Sequence

RANKS = 3  # alternatives worth a look: the best token, the second, the third
_GAPS = (0.25, 0.5, 1.0, 1.5, 2.25, 3.0, 4.5)  # what separates one class of choices from the next
_FORGETTING = 0.998  # what an observation still counts, one observation of its class later
_PRIOR_TOKENS = 8.0  # how many observations the prior is worth
_LEAST = 1e-4  # no chance is ever given up
_PRIOR_SHARES = (0.4, 0.2)  # of the chance that the best token is wrong: to be the second, the third


class RankCalibration:
    """Chances by gap (the best noisy score less the second, not negative) and rank (0: the best)."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_GAPS), (*_GAPS, _GAPS[-1] + 2), strict=True)]
        self._counts = [[_PRIOR_TOKENS * chance for chance in _prior(gap)] for gap in middles]
        self._observed = [_PRIOR_TOKENS] * len(middles)

    def chances(self, gap: float) -> list[float]:
        """[RANKS] the chance of each rank to be the target's token."""
        at = bisect(_GAPS, gap)
        return [max(count / self._observed[at], _LEAST) for count in self._counts[at]]

    def note(self, gap: float, rank: int | None) -> None:
        """Count a token of the target: its rank in the drafter's choice, None if it was none of them."""
        at = bisect(_GAPS, gap)
        self._counts[at] = [_FORGETTING * count + (i == rank) for i, count in enumerate(self._counts[at])]
        self._observed[at] = _FORGETTING * self._observed[at] + 1


def _prior(gap: float) -> Sequence[float]:
    wrong = 0.65 * math.exp(-gap / 2)
    return (1 - wrong, *(wrong * share for share in _PRIOR_SHARES))
