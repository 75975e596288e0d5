"""Timeline of a traced request: which replicas worked on it, and when. Knows nothing of trace formats.

It stays in the coordinator's memory. Times are nanoseconds since 1970.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["target", "drafter"]


@dataclass(slots=True)
class Stay:
    """A request's time on one replica."""

    role: Role
    replica: str
    began_ns: int
    first_ns: int | None = None  # when its first tokens were committed (target) or verified (drafter)
    last_ns: int | None = None  # likewise, the last tokens so far
    ended_ns: int | None = None
    messages: int = 0  # number of target steps; for a drafter, of those with drafts
    tokens: int = 0  # number committed (target) or verified (drafter)


@dataclass(slots=True)
class Timeline:
    """Timeline of one request, written by the coordinator's thread and read when the request has ended."""

    received_ns: int = field(default_factory=time.time_ns)
    admitted_ns: int | None = None  # when it left the queue
    stays: list[Stay] = field(default_factory=list)

    def move(self, role: Role, replica: str | None) -> None:
        """Record that another replica, or none, works on the request from now on."""
        now_ns = time.time_ns()
        for stay in self.stays:
            if stay.role == role and stay.ended_ns is None:
                stay.ended_ns = now_ns
        if replica is not None:
            self.stays.append(Stay(role, replica, now_ns))

    def record_tokens(self, role: Role, count: int) -> None:
        """Record one step that committed (target) or verified (drafter) `count` tokens of the current replica."""
        stay = next((stay for stay in reversed(self.stays) if stay.role == role), None)
        if stay is None:
            return
        stay.last_ns = time.time_ns()
        stay.first_ns = stay.first_ns or stay.last_ns
        stay.messages += 1
        stay.tokens += count
