"""Collects the members' contributions to each choice. Knows no formats of answers."""

from collections.abc import Sequence

from actors.coordinator.request import Delta, Request
from deployments.answers.ensemble_details import EnsembleDetail, describe_blend, describe_outcome
from deployments.strategies.deliberation import Outcome


class EnsembleTally:
    """Contributions to all choices of one answer; empty for endpoints without members."""

    def __init__(self, requests: Sequence[Request], *, wanted: bool) -> None:
        """wanted: whether the client wants `ensemble`."""
        self._blends = [request.ensemble_options.blend.kind for request in requests]
        self._wanted = wanted
        self._details: dict[int, EnsembleDetail] = {}

    def add(self, index: int, delta: Delta) -> None:
        if self._wanted and delta.members is not None:
            self._details[index] = describe_blend(self._blends[index], delta.members)

    def conclude(self, index: int, outcome: Outcome) -> None:
        if self._wanted:
            self._details[index] = describe_outcome(outcome)

    def detail(self, index: int) -> EnsembleDetail | None:
        """Detail of a choice; None if it has no members or the detail is not wanted."""
        return self._details.get(index)
