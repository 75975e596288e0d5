"""Collects, for each choice of an answer, what its members contributed. Knows nothing of how answers are written."""

from collections.abc import Sequence

from actors.coordinator.request import Delta, Request
from deployments.answers.ensemble_details import EnsembleDetail, of_outcome, of_shares
from deployments.strategies.progress import Outcome


class EnsembleTally:
    """Of all requests of one answer; empty for endpoints without members."""

    def __init__(self, requests: Sequence[Request], *, wanted: bool) -> None:
        """wanted: whether the client wants to know."""
        self._blends = [request.ensemble_options.blend.kind for request in requests]
        self._wanted = wanted
        self._details: dict[int, EnsembleDetail] = {}

    def add(self, index: int, delta: Delta) -> None:
        """Take in what a blend's members contributed so far."""
        if self._wanted and delta.members is not None:
            self._details[index] = of_shares(self._blends[index], delta.members)

    def conclude(self, index: int, outcome: Outcome) -> None:
        """Take in how a choice among whole answers was made."""
        if self._wanted:
            self._details[index] = of_outcome(outcome)

    def of(self, index: int) -> EnsembleDetail | None:
        """Of a choice; None if it has no members, or nobody wants to know."""
        return self._details.get(index)
