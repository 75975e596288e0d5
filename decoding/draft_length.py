"""Goodput control: how many draft tokens each row should verify in the next step. Pure arithmetic.

Draft tokens are worth verifying as long as they raise the expected committed tokens per second, from their chances and
the measured cost of a step (TurboSpec, arXiv 2406.14066, section 3). Under load, where more tokens make a step slower,
they fall to zero.
"""

from collections.abc import Callable, Sequence

_PATIENCE_TOKENS = 16  # how far to look beyond the best so far: step costs have plateaus


class AcceptanceEstimate:
    """The probability that a next draft token is accepted, from what was seen lately.

    Without news it drifts to an optimistic prior, so that drafts get tried again: no estimate is ever final.
    """

    _PRIOR, _PRIOR_TOKENS = 0.6, 0.5
    _EXPECTED_TOKENS = 4.0  # how many tokens the first expectation is worth

    def __init__(self, expected: float = _PRIOR, *, forgetting: float = 0.98) -> None:
        """expected: before anything was seen. forgetting: what a step later an observation still counts."""
        self._forgetting = forgetting
        self._accepted = self._EXPECTED_TOKENS * expected
        self._tested = self._EXPECTED_TOKENS

    @property
    def value(self) -> float:
        return (self._accepted + self._PRIOR_TOKENS * self._PRIOR) / (self._tested + self._PRIOR_TOKENS)

    def note(self, *, drafted: int, accepted: int) -> None:
        """Count one step: its accepted tokens, and the first rejected one; those behind it were never tested."""
        self._accepted = self._forgetting * self._accepted + accepted
        self._tested = self._forgetting * self._tested + min(accepted + 1, drafted)


def choose_draft_tokens(chances: Sequence[Sequence[float]], step_cost_s: Callable[[int], float]) -> list[int]:
    """Of the drafts that are there, how many tokens of each row to verify.

    Args:
        chances: [B][K] the probability that each draft token is committed, the most probable first.
        step_cost_s: seconds of a step over so many tokens in all, the rows' own last tokens included.

    Returns:
        [B] how many tokens of each row, those with the best chances.
    """
    rows = len(chances)
    ordered = sorted(((chance, row) for row, of_row in enumerate(chances) for chance in of_row), reverse=True)
    expected = float(rows)  # every row commits its recovered or bonus token
    best, best_goodput = 0, expected / step_cost_s(rows)
    for count, (chance, _) in enumerate(ordered, start=1):
        expected += chance
        goodput = expected / step_cost_s(rows + count)
        if goodput > best_goodput:
            best, best_goodput = count, goodput
        elif count > best + _PATIENCE_TOKENS:
            break
    lengths = [0] * rows
    for _, row in ordered[:best]:
        lengths[row] += 1
    return lengths


def choose_draft_lengths(
    acceptance: Sequence[float],
    limits: Sequence[int],
    step_cost_s: Callable[[int], float],
    draft_latency_s: float,
    *,
    alternating: bool = False,
) -> list[int]:
    """The draft length, common to all rows up to their limits, that maximises expected committed tokens per second.

    Args:
        acceptance: [B] probability that a draft token is accepted if those before it are.
        limits: [B] the most draft tokens that each row may verify.
        step_cost_s: seconds of a step over so many tokens in all, the rows' own last tokens included.
        draft_latency_s: seconds until a draft is there, per token; 0 for drafts that are there already.
        alternating: every draft is waited for, not just those that a verdict surprised.

    Returns:
        [B] draft lengths.
    """
    tokens = len(acceptance)
    expected = float(tokens)
    best, best_goodput = 0, expected / step_cost_s(tokens)
    for length in range(1, max(limits) + 1):
        longer = [rate for rate, limit in zip(acceptance, limits, strict=True) if limit >= length]
        tokens += len(longer)
        expected += sum(rate**length for rate in longer)
        wait_s = draft_latency_s * length * (1.0 if alternating else _chance_to_wait(acceptance, limits, length))
        goodput = expected / (step_cost_s(tokens) + wait_s)
        if goodput > best_goodput:
            best, best_goodput = length, goodput
    return [min(best, limit) for limit in limits]


def _chance_to_wait(acceptance: Sequence[float], limits: Sequence[int], length: int) -> float:
    """The probability that some row's next draft must be made anew, because the verdict differs from the run-ahead."""
    hit = 1.0
    for rate, limit in zip(acceptance, limits, strict=True):
        hit *= rate ** (min(limit, length) + 1) if limit else 1.0
    return 1.0 - hit
