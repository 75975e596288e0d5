"""Interface of what writes an answer: deltas of one HTTP request in, events or a whole document out."""

from abc import ABC, abstractmethod
from typing import Any

from actors.coordinator.request import Delta
from deployments.strategies.deliberation import Outcome, Progress


class Writer(ABC):
    """Writer of one answer. Returned events are text: none, one or several."""

    @abstractmethod
    def begin(self) -> str:
        """Return the events before the first delta."""

    @abstractmethod
    def add(self, index: int, delta: Delta) -> str:
        """Add a delta of the request with that index; return its events."""

    def add_progress(self, index: int, event: Progress | Outcome) -> str:
        """Add progress or the outcome of a choice among whole answers; return its events."""
        return ""

    @abstractmethod
    def end(self) -> str:
        """Return the events after the last delta."""

    @abstractmethod
    def fail(self, error: Exception) -> str:
        """Return the error event that ends a failed stream."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the whole answer after the last delta, for msgspec."""
