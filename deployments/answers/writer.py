"""What writes an answer: takes in the deltas of one HTTP request, gives its events or its whole document."""

from abc import ABC, abstractmethod
from typing import Any

from actors.coordinator.request import Delta
from deployments.strategies.progress import Outcome, Progress


class Writer(ABC):
    """One kind of answer. Events are texts, several at once or none."""

    @abstractmethod
    def begin(self) -> str:
        """The events before the first delta's."""

    @abstractmethod
    def add(self, index: int, delta: Delta) -> str:
        """Take in a delta of one of the requests; returns its events."""

    def tell(self, index: int, event: Progress | Outcome) -> str:
        """Take in how far the choice among whole answers to one of the requests is; returns its events."""
        return ""

    @abstractmethod
    def end(self) -> str:
        """The events after the last delta's."""

    @abstractmethod
    def fail(self, error: Exception) -> str:
        """The last event of a stream that can't go on."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer, once all deltas are in."""
