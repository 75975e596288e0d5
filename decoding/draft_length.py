"""Goodput control: how many draft tokens each row should verify in the next step. Pure arithmetic.

The draft lengths maximise expected committed tokens per second, from each row's acceptance and the measured cost of a
step (TurboSpec, arXiv 2406.14066, section 3). Under load, where more tokens make a step slower, they fall to zero.
"""

from collections.abc import Callable, Sequence


class AcceptanceEstimate:
    """A row's probability that its next draft token is accepted, from what it saw lately."""

    _FORGETTING = 0.95  # per step; without news the estimate drifts back to the prior, so that drafts get tried again
    _PRIOR_TOKENS = 2.0

    def __init__(self, prior: float = 0.6) -> None:
        self._prior = prior
        self._accepted = 0.0
        self._tested = 0.0

    @property
    def value(self) -> float:
        return (self._accepted + self._PRIOR_TOKENS * self._prior) / (self._tested + self._PRIOR_TOKENS)

    def note(self, *, drafted: int, accepted: int) -> None:
        """Count one step: its accepted tokens, and the first rejected one; those behind it were never tested."""
        self._accepted = self._FORGETTING * self._accepted + accepted
        self._tested = self._FORGETTING * self._tested + min(accepted + 1, drafted)


def choose_draft_lengths(
    acceptance: Sequence[float],
    limits: Sequence[int],
    step_cost_s: Callable[[int], float],
    draft_latency_s: float,
) -> list[int]:
    """The draft length of each row that maximises expected committed tokens per second.

    Args:
        acceptance: [B] probability that a draft token is accepted if those before it are.
        limits: [B] the most draft tokens that each row may verify.
        step_cost_s: seconds of a step that verifies so many tokens in all, the rows' own last tokens included.
        draft_latency_s: seconds until a draft is there, per token; 0 for drafts that are there already.

    Returns:
        [B] draft lengths. Tokens are added in order of the probability that they get committed, which is best for
        any given number of tokens, as the cost depends on nothing else.
    """
    candidates = sorted(
        ((rate ** (depth + 1), row) for row, rate in enumerate(acceptance) for depth in range(limits[row])),
        key=lambda candidate: -candidate[0],
    )
    lengths = [0] * len(acceptance)
    expected = float(len(acceptance))  # every row commits its recovered or bonus token
    best, best_goodput = list(lengths), expected / step_cost_s(len(acceptance))
    for tokens, (gain, row) in enumerate(candidates, len(acceptance) + 1):
        lengths[row] += 1
        expected += gain
        wait_s = draft_latency_s * max(lengths) * _chance_to_wait(acceptance, lengths) if draft_latency_s else 0.0
        goodput = expected / (step_cost_s(tokens) + wait_s)
        if goodput > best_goodput:
            best, best_goodput = list(lengths), goodput
    return best


def _chance_to_wait(acceptance: Sequence[float], lengths: Sequence[int]) -> float:
    """The probability that some row's next draft must be made anew, because the verdict differs from the run-ahead."""
    hit = 1.0
    for rate, length in zip(acceptance, lengths, strict=True):
        hit *= rate ** (length + 1) if length else 1.0
    return 1.0 - hit
