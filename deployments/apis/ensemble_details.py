"""What an answer says about an ensemble: its members, candidates and progress."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from msgspec import structs
from pydantic import AfterValidator, BaseModel, ConfigDict

from actors.coordinator.request import Delta, Request
from actors.wire.messages import MemberShare
from deployments.strategies.panel import Outcome, Progress, WriterReport

_DIGITS = 4
_LEAST = -9999.0  # JSON has no minus infinity


def _round(value: float) -> float:
    return round(value, _DIGITS) if math.isfinite(value) else _LEAST


Rounded = Annotated[float, AfterValidator(_round)]


class MemberDetail(BaseModel):
    """Contribution of a member."""

    model: str
    answered: bool  # false: it failed before the end
    weight: Rounded  # of 1 in all; 0: it failed
    prompt_tokens: int | None = None  # read for each candidate
    tokens: int
    agreement: Rounded | None  # share of tokens that were its most probable, or of its candidates
    latency_ms: Rounded  # blends: mean per step, 0 for the leader; else until its last candidate
    candidates: int | None = None
    votes: int | None = None
    error: str | None = None


class CandidateDetail(BaseModel):
    """Score of a candidate."""

    model_config = ConfigDict(from_attributes=True)

    model: str
    index: int
    score: Rounded | None
    log_likelihood: Rounded  # nats per token
    tokens: int
    extracted: str | None = None
    text: str | None = None  # what the writer was shown


class WriterDetail(BaseModel):
    """Contribution of the model that wrote the answer from the candidates."""

    model: str
    prompt_tokens: int  # the candidates among them
    tokens: int
    latency_ms: Rounded


class EnsembleDetail(BaseModel):
    """How several models made one answer. Unset fields are not sent."""

    blend: str | None = None
    strategy: str | None = None
    winner: str | None = None
    writer: WriterDetail | None = None
    agreement: Rounded | None = None
    votes: dict[str, Rounded] | None = None
    members: Sequence[MemberDetail]
    candidates: Sequence[CandidateDetail] | None = None


class ProgressDetail(BaseModel):
    """Progress towards an answer."""

    event: str
    model: str
    done: int
    total: int
    index: int | None = None
    tokens: int | None = None
    log_likelihood: Rounded | None = None
    text: str | None = None
    error: str | None = None


def _describe_member(fields: dict[str, Any], *, answered: bool) -> MemberDetail:
    return MemberDetail(answered=answered, latency_ms=1e3 * fields.pop("latency_s"), **fields)


def _describe_blend(blend: str, shares: Sequence[MemberShare]) -> EnsembleDetail:
    most = shares[0].tokens  # the leader contributes to every token
    members = [_describe_member(structs.asdict(share), answered=share.tokens == most) for share in shares]
    return EnsembleDetail(blend=blend, members=members)


def _describe_writer(writer: WriterReport) -> WriterDetail:
    fields = asdict(writer)
    return WriterDetail(latency_ms=1e3 * fields.pop("latency_s"), **fields)


def _describe_outcome(outcome: Outcome) -> EnsembleDetail:
    members = [_describe_member(asdict(member), answered=member.error is None) for member in outcome.members]
    return EnsembleDetail(
        strategy=outcome.strategy,
        winner=outcome.winner,
        writer=None if outcome.writer is None else _describe_writer(outcome.writer),
        agreement=outcome.agreement,
        votes=outcome.votes,
        members=members,
        candidates=[CandidateDetail.model_validate(candidate) for candidate in outcome.candidates],
    )


def describe_progress(progress: Progress) -> ProgressDetail:
    """Detail of one step of progress."""
    fields = asdict(progress)
    return ProgressDetail(event=fields.pop("kind"), **fields)


class EnsembleTally:
    """Contributions to all choices of one answer; empty for endpoints without members."""

    def __init__(self, requests: Sequence[Request], *, wanted: bool) -> None:
        """wanted: whether the client wants `ensemble`."""
        self._blends = [request.ensemble_options.blend.kind for request in requests]
        self._wanted = wanted
        self._details: dict[int, EnsembleDetail] = {}

    def add(self, index: int, delta: Delta) -> None:
        if self._wanted and delta.members is not None:
            self._details[index] = _describe_blend(self._blends[index], delta.members)

    def conclude(self, index: int, outcome: Outcome) -> None:
        if self._wanted:
            self._details[index] = _describe_outcome(outcome)

    def detail(self, index: int) -> EnsembleDetail | None:
        """Detail of a choice; None if it has no members or the detail is not wanted."""
        return self._details.get(index)
