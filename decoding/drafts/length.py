"""How many draft tokens each row should verify in the next step.

A draft token is verified if it raises the expected committed tokens per second, given the measured cost of a step
(TurboSpec, arXiv 2406.14066, section 3).
"""

from collections.abc import Callable, Sequence

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
        self._tested = self._forgetting * self._tested + (drafted if drafted <= accepted else accepted + 1)


def choose_draft_tokens(probabilities: Sequence[Sequence[float]], step_cost_s: Callable[[int], float]) -> list[int]:
    """Choose how many of its most probable draft tokens each row verifies, [B].

    probabilities: [B][K] that each draft token is committed, falling.
    step_cost_s: seconds of a step by its number of tokens, the last committed token of each row included.
    """
    rows = len(probabilities)
    pairs = [(probability, row) for row, draft in enumerate(probabilities) for probability in draft]
    pairs.sort(reverse=True)
    expected = float(rows)  # the recovered or bonus token of every row
    best, best_goodput = 0, expected / step_cost_s(rows)
    for count, (probability, _) in enumerate(pairs, start=1):
        expected += probability
        goodput = expected / step_cost_s(rows + count)
        if goodput > best_goodput:
            best, best_goodput = count, goodput
        elif count > best + _PATIENCE_TOKENS:
            break
    lengths = [0] * rows
    for _, row in pairs[:best]:
        lengths[row] += 1
    return lengths


def choose_draft_lengths(
    acceptance: Sequence[float],
    limits: Sequence[int],
    step_cost_s: Callable[[int], float],
    draft_latency_s: float,
    *,
    first_latency_s: float | None = None,
    alternating: bool = False,
) -> list[int]:
    """Choose the common draft length that maximises expected committed tokens per second, [B] within the limits.

    acceptance: [B] probability that a draft token is accepted if those before it are.
    limits: [B] maximum draft tokens of each row.
    step_cost_s: as in `choose_draft_tokens`.
    draft_latency_s: seconds to wait per draft token; 0 if the drafts exist already.
    first_latency_s: for the first token, if that takes another time.
    alternating: drafting and verification alternate, so the target waits for every draft.
    """
    tokens = len(acceptance)
    expected = float(tokens)
    best, best_goodput = 0, expected / step_cost_s(tokens)
    first_s = draft_latency_s if first_latency_s is None else first_latency_s
    for length in range(1, max(limits) + 1):
        longer = [rate for rate, limit in zip(acceptance, limits, strict=True) if limit >= length]
        tokens += len(longer)
        expected += sum(rate**length for rate in longer)
        drafting_s = first_s + draft_latency_s * (length - 1)
        wait_s = drafting_s * (1.0 if alternating else _wait_probability(acceptance, limits, length))
        goodput = expected / (step_cost_s(tokens) + wait_s)
        if goodput > best_goodput:
            best, best_goodput = length, goodput
    return [min(best, limit) for limit in limits]


def _wait_probability(acceptance: Sequence[float], limits: Sequence[int], length: int) -> float:
    """Return the probability that the verdict contradicts some row's run-ahead, so that its draft is made again."""
    hit = 1.0
    for rate, limit in zip(acceptance, limits, strict=True):
        hit *= rate ** (min(limit, length) + 1) if limit else 1.0
    return 1.0 - hit
