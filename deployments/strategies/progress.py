"""What a deliberation tells: how far it is, and in the end the answer, with who contributed what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.coordinator.request import Delta

ProgressKind = Literal["candidate", "scored", "member_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step on the way. Its index is the candidate's among its member's."""

    kind: ProgressKind
    model: str  # the member's
    done: int  # so many steps of this kind, the failed ones included
    total: int
    index: int | None = None
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
    extracted: str | None  # what it voted for, of a vote


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """What a member contributed."""

    model: str
    weight: float  # of all that answered; 0: it failed
    candidates: int
    tokens: int
    votes: int | None  # of its candidates, how many say what the winner says; None: nobody votes
    agreement: float | None  # their share
    latency_s: float  # until its last candidate
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end: the winner as one delta whose statistics are those of all candidates, and how it came to be."""

    delta: Delta
    strategy: str
    winner: str  # the member's model
    agreement: float | None
    votes: dict[str, float] | None
    members: Sequence[MemberReport]
    candidates: Sequence[CandidateReport]  # best first
