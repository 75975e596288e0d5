"""What is noted of a request's life where it is coordinated: which replicas worked on it, and when. For traces.

Kept only for requests that are traced, in the coordinator's memory: nothing of it crosses a link. Times are
nanoseconds since 1970. Knows nothing of where they go.
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
    first_ns: int | None = None  # when the first tokens came: committed, or verified
    last_ns: int | None = None  # when the last ones came, so far
    ended_ns: int | None = None
    messages: int = 0  # steps of a target, those with drafts of a drafter
    tokens: int = 0  # committed, or verified


@dataclass(slots=True)
class Timeline:
    """Of one request. The coordinator's thread writes it; who gave it to the request reads it at the end."""

    received_ns: int = field(default_factory=time.time_ns)
    admitted_ns: int | None = None  # when it began, after having waited
    stays: list[Stay] = field(default_factory=list)

    def move(self, role: Role, replica: str | None) -> None:
        """Another replica works on it from now on, or none."""
        now_ns = time.time_ns()
        for stay in self.stays:
            if stay.role == role and stay.ended_ns is None:
                stay.ended_ns = now_ns
        if replica is not None:
            self.stays.append(Stay(role, replica, now_ns))

    def heard(self, role: Role, tokens: int) -> None:
        """So many tokens of its replica: a step of the target committed them, or verified them."""
        stay = next((stay for stay in reversed(self.stays) if stay.role == role), None)
        if stay is None:
            return
        stay.last_ns = time.time_ns()
        stay.first_ns = stay.first_ns or stay.last_ns
        stay.messages += 1
        stay.tokens += tokens
