"""Interface of what writes an answer; its id, time and seed."""

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from actors.coordinator.request import Delta
from deployments.strategies.panel import Outcome, Progress


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """Id, time and seed of an answer."""

    answer_id: str  # 24 hexadecimal digits
    created: int  # seconds since 1970
    seed: int

    @staticmethod
    def new(seed: int) -> "AnswerIdentity":
        """Return the identity of an answer that begins now."""
        return AnswerIdentity(secrets.token_hex(12), int(time.time()), seed)

    def __str__(self) -> str:
        return f"{self.answer_id}.{self.created:x}.{self.seed:x}"


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
