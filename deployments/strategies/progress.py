"""Events of a deliberation: its progress, and in the end the answer with each member's contribution."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.coordinator.request import Delta

ProgressKind = Literal["candidate", "scored", "member_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A finished step."""

    kind: ProgressKind
    model: str  # the member's
    done: int  # finished steps of this kind, failed ones included
    total: int
    index: int | None = None  # of the candidate, among its member's
    tokens: int | None = None
    log_likelihood: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """How a candidate was judged."""

    model: str
    index: int
    score: float
    log_likelihood: float  # nats per token, by its own member
    tokens: int
    extracted: str | None  # majority: the answer it voted for


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """What a member contributed."""

    model: str
    weight: float  # share among the members that answered; 0: it failed
    candidates: int
    tokens: int
    votes: int | None  # candidates with the winner's answer; None without a vote
    agreement: float | None  # share of its candidates with the winner's answer
    latency_s: float  # until its last candidate
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result: the winner as one delta, whose statistics count all candidates, and how it was chosen."""

    delta: Delta
    strategy: str
    winner: str  # model of its member
    agreement: float | None
    votes: dict[str, float] | None
    members: Sequence[MemberReport]
    candidates: Sequence[CandidateReport]  # best first
