"""Goodput control: how many draft tokens each row should verify in the next step. Pure arithmetic.

A draft token is verified if it raises the expected committed tokens per second, given the measured cost of a step
(TurboSpec, arXiv 2406.14066, section 3). Under load, steps over more tokens are slower, and draft lengths fall to 0.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy

# Seconds of steps by their numbers of tokens, the last committed token of each row included.
StepCosts = Callable[[numpy.ndarray], numpy.ndarray]

_PATIENCE_TOKENS = 16  # search this many tokens beyond the best count, because step costs have plateaus


class AcceptanceEstimate:
    """A decaying estimate of the probability that the next draft token is accepted.

    Without observations it returns to an optimistic prior, so drafting is tried again.
    """

    _PRIOR, _PRIOR_TOKENS = 0.6, 0.5
    _EXPECTED_TOKENS = 4.0  # the first expectation counts as so many tokens

    def __init__(self, expected: float = _PRIOR, *, forgetting: float = 0.98) -> None:
        """expected: the estimate before any observation. forgetting: weight of an observation after the next step."""
        self._forgetting = forgetting
        self._accepted = self._EXPECTED_TOKENS * expected
        self._tested = self._EXPECTED_TOKENS

    @property
    def value(self) -> float:
        return (self._accepted + self._PRIOR_TOKENS * self._PRIOR) / (self._tested + self._PRIOR_TOKENS)

    def note(self, *, drafted: int, accepted: int) -> None:
        """Count one step: its accepted tokens and the first rejected one. Tokens after that were not tested."""
        self._accepted = self._forgetting * self._accepted + accepted
        self._tested = self._forgetting * self._tested + min(accepted + 1, drafted)


def choose_draft_tokens(probabilities: Sequence[Sequence[float]], step_costs_s: StepCosts) -> list[int]:
    """Choose how many tokens of each row's draft to verify.

    Args:
        probabilities: [B][K] that each draft token is committed, falling.
        step_costs_s: of steps with so many tokens.

    Returns:
        [B] the number of tokens; each row verifies its most probable ones.
    """
    rows = len(probabilities)
    owners = numpy.arange(rows).repeat([len(draft) for draft in probabilities])  # [N]
    values = numpy.array([*chain.from_iterable(probabilities)])  # [N]
    order = numpy.lexsort((-owners, -values))  # the most probable first
    expected = rows + numpy.concatenate(([0.0], values[order].cumsum()))  # the own token of every row included
    goodput = expected / step_costs_s(numpy.arange(rows, rows + len(expected)))  # [N + 1] by number of draft tokens
    best_before = numpy.concatenate(([-1.0], numpy.maximum.accumulate(goodput)[:-1]))
    records = numpy.flatnonzero(goodput > best_before)
    too_far = numpy.flatnonzero(numpy.diff(records) > _PATIENCE_TOKENS + 1)
    best = records[too_far[0] if len(too_far) else -1]
    lengths: list[int] = numpy.bincount(owners[order[:best]], minlength=rows).tolist()
    return lengths


def choose_draft_lengths(
    acceptance: Sequence[float],
    limits: Sequence[int],
    step_costs_s: StepCosts,
    draft_latency_s: float,
    *,
    alternating: bool = False,
) -> list[int]:
    """Choose the common draft length that maximises expected committed tokens per second.

    Args:
        acceptance: [B] probability that a draft token is accepted if those before it are.
        limits: [B] maximum draft tokens of each row.
        step_costs_s: of steps with so many tokens.
        draft_latency_s: seconds to wait per draft token; 0 if the drafts exist already.
        alternating: drafting and verification alternate, so the target waits for every draft.

    Returns:
        [B] draft lengths, none above its limit.
    """
    rates, most = numpy.array(acceptance), numpy.array(limits)  # [B]
    lengths = numpy.arange(most.max() + 1)[:, None]  # [L + 1, 1]
    drafted = numpy.minimum(lengths, most)  # [L + 1, B]
    gains = numpy.where(lengths <= most, rates**lengths, 0.0).cumsum(0)  # [L + 1, B] expected tokens, the own included
    wait_s = draft_latency_s * lengths[:, 0]  # [L + 1]
    if not alternating:  # only if the verdict contradicts some row's run-ahead, so that its draft is made again
        wait_s = wait_s * (1.0 - numpy.where(most > 0, rates ** (drafted + 1), 1.0).prod(1))
    costs_s = step_costs_s(len(rates) + drafted.sum(1)) + wait_s
    best = int((gains.sum(1) / costs_s).argmax())  # the shortest at a tie
    return [min(best, limit) for limit in limits]
