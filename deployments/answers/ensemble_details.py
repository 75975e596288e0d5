"""How answers tell of the members of an ensemble, and how far a choice among whole answers is."""

import math
from collections.abc import Sequence

from pydantic import BaseModel

from actors.wire.messages import MemberShare
from deployments.strategies.progress import Outcome, Progress

_DIGITS = 4
_LEAST = -9999.0  # JSON has no minus infinity


class MemberDetail(BaseModel):
    """What a member contributed."""

    model: str
    answered: bool  # whether it was there to the end
    weight: float  # of 1 in all; 0: it is gone
    tokens: int
    agreement: float | None  # blends: share of the tokens that it found the most probable; votes: of its candidates
    latency_ms: float  # blends: mean of a step's answer, 0 for the leader; else until its last candidate
    candidates: int | None = None
    votes: int | None = None
    error: str | None = None


class CandidateDetail(BaseModel):
    """How a candidate was judged."""

    model: str
    index: int
    score: float
    log_likelihood: float  # nats per token
    tokens: int
    extracted: str | None = None


class EnsembleDetail(BaseModel):
    """How several models came to one answer. Fields that are not set are not sent."""

    blend: str | None = None
    strategy: str | None = None
    winner: str | None = None
    agreement: float | None = None
    votes: dict[str, float] | None = None
    members: Sequence[MemberDetail]
    candidates: Sequence[CandidateDetail] | None = None


class ProgressDetail(BaseModel):
    """A step on the way to an answer."""

    event: str
    model: str
    done: int
    total: int
    index: int | None = None
    tokens: int | None = None
    log_likelihood: float | None = None
    error: str | None = None


def of_shares(blend: str, shares: Sequence[MemberShare]) -> EnsembleDetail:
    """Of a blend."""
    members = [
        MemberDetail(
            model=share.model,
            answered=share.tokens == shares[0].tokens,  # the leader has a part in all
            weight=_round(share.weight),
            tokens=share.tokens,
            agreement=_round(share.agreement),
            latency_ms=_round(1e3 * share.latency_s),
        )
        for share in shares
    ]
    return EnsembleDetail(blend=blend, members=members)


def of_outcome(outcome: Outcome) -> EnsembleDetail:
    """Of a choice among whole answers."""
    members = [
        MemberDetail(
            model=one.model,
            answered=one.error is None,
            weight=_round(one.weight),
            tokens=one.tokens,
            agreement=None if one.agreement is None else _round(one.agreement),
            latency_ms=_round(1e3 * one.latency_s),
            candidates=one.candidates,
            votes=one.votes,
            error=one.error,
        )
        for one in outcome.members
    ]
    candidates = [
        CandidateDetail(
            model=one.model,
            index=one.index,
            score=_round(one.score),
            log_likelihood=_round(one.log_likelihood),
            tokens=one.tokens,
            extracted=one.extracted,
        )
        for one in outcome.candidates
    ]
    return EnsembleDetail(
        strategy=outcome.strategy,
        winner=outcome.winner,
        agreement=None if outcome.agreement is None else _round(outcome.agreement),
        votes=outcome.votes and {answer: _round(share) for answer, share in outcome.votes.items()},
        members=members,
        candidates=candidates,
    )


def of_progress(progress: Progress) -> ProgressDetail:
    """Of a step."""
    likelihood = progress.log_likelihood
    return ProgressDetail(
        event=progress.kind,
        model=progress.model,
        done=progress.done,
        total=progress.total,
        index=progress.index,
        tokens=progress.tokens,
        log_likelihood=None if likelihood is None else _round(likelihood),
        error=progress.error,
    )


def _round(value: float) -> float:
    return round(value, _DIGITS) if math.isfinite(value) else _LEAST
