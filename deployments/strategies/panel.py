"""The members of a panel propose whole answers, under the endpoint's failure policy."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError, UnavailableError
from deployments.strategies.members import Candidate, MemberClient, Participant, Run, merge_streams
from deployments.strategies.strategy import StrategyOptions

_FAILURES = (UnavailableError, DeadlineError)  # failures of a member; other errors are the request's or the server's


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A finished step."""

    kind: Literal["candidate", "scored", "member_failed"]
    model: str  # the member's
    done: int  # finished steps of this kind, failed ones included
    total: int
    index: int | None = None  # of the candidate, among its member's
    tokens: int | None = None
    log_likelihood: float | None = None
    text: str | None = None  # of the candidate, if a writer is shown it
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """How a candidate was judged."""

    model: str
    index: int
    score: float | None  # None: nobody chose among the candidates
    log_likelihood: float  # nats per token, by its own member
    tokens: int
    extracted: str | None = None  # majority: the answer it voted for
    text: str | None = None  # synthesize: what the writer was shown


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """What a member contributed."""

    model: str
    weight: float  # share among the members that answered; 0: it failed
    candidates: int
    prompt_tokens: int  # in its own tokens; each candidate read them
    tokens: int
    votes: int | None = None  # candidates with the winner's answer; None without a vote
    agreement: float | None = None  # share of its candidates with the winner's answer
    latency_s: float  # until its last candidate
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterReport:
    """What the writer of an answer read and wrote."""

    model: str
    prompt_tokens: int  # the candidates among them
    tokens: int
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result: the winner, or the end of what was written, as one delta, and how it came about."""

    delta: Delta  # its statistics count all candidates, too
    strategy: str
    winner: str | None = None  # model of its member
    writer: WriterReport | None = None
    agreement: float | None = None
    votes: dict[str, float] | None = None
    members: Sequence[MemberReport]
    candidates: Sequence[CandidateReport]  # best first, or in the order of the members


class Panel:
    """Members that answer one request. Its `ensemble_options` have weights, failure policy and time limits."""

    def __init__(
        self, requests: Sequence[Request], options: StrategyOptions, run: Run, ready: Callable[[], set[str]]
    ) -> None:
        """
        requests: the request as each member gets it, the leader's first.
        run, ready: see `MemberClient`.
        """
        leader = requests[0]
        self._options, self._ready, self._policy = options, ready, leader.ensemble_options
        self._timeout_s = leader.timeout_s
        self._deadline_s = None if leader.timeout_s is None else time.monotonic() + leader.timeout_s
        self._members = [Participant(request) for request in requests]
        self._client = MemberClient(run, ready, self._policy.member_timeout_s)
        self._candidates: list[Candidate] = []  # by member, in the order of their indices
        self._done = self._total = 0  # steps of the current phase

    async def _proposals(self) -> AsyncGenerator[Progress, None]:
        """Let the members propose; yield their progress.

        Raises ConsortError if too few members are left, or one failed that must not, or the request is at fault.
        """
        ready = self._ready()
        for member in self._members:
            if member.model not in ready:
                self._fail(member, UnavailableError(f"member {member.model!r} has no replica"))
        self._total = len(self._present) * self._options.candidates
        async with aclosing(self._gather(self._propose)) as proposals:
            async for step in proposals:
                yield step
        for member in self._members:
            member.candidates.sort(key=lambda candidate: candidate.index)
        self._candidates = [candidate for member in self._present for candidate in member.candidates]

    @property
    def requests(self) -> list[Request]:
        """The request as each member gets it, but for the seeds of its candidates."""
        return [member.request for member in self._members]

    @property
    def _present(self) -> list[Participant]:
        return [member for member in self._members if member.error is None]

    async def _gather(
        self, work: Callable[[Participant], AsyncGenerator[Progress, None]]
    ) -> AsyncGenerator[Progress, None]:
        async with aclosing(merge_streams([self._surviving(member, work(member)) for member in self._present])) as all_:
            async for _, step in all_:
                yield step

    async def _surviving(
        self, member: Participant, work: AsyncGenerator[Progress, None]
    ) -> AsyncGenerator[Progress, None]:
        """Yield the progress of a member's work, and its failure if the others can go on without it."""
        try:
            async with aclosing(work):
                async for step in work:
                    yield step
        except _FAILURES as error:
            if self._left_s == 0:  # no failure of the member
                raise DeadlineError(f"timeout_s: the request took longer than {self._timeout_s:g} s") from error
            yield self._fail(member, error)

    @property
    def _left_s(self) -> float | None:
        """Seconds until the request's own time limit; None: it has none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _fail(self, member: Participant, error: ConsortError) -> Progress:
        """Go on without the member; raises UnavailableError if the policy or the number of members left forbids it."""
        member.error = error
        if not self._policy.has_quorum([member.error is None for member in self._members]):
            raise UnavailableError(f"a member failed: {error}") from error
        self._weights()  # raises if all weights left are 0
        return Progress(kind="member_failed", model=member.model, done=self._done, total=self._total, error=str(error))

    def _weights(self) -> dict[str, float]:
        """Return the weight of each member; they sum to 1."""
        shares = self._policy.blend.member_weights([member.error is None for member in self._members])
        return {member.model: share for member, share in zip(self._members, shares, strict=True)}

    async def _propose(self, member: Participant) -> AsyncGenerator[Progress, None]:
        count = self._options.candidates
        async with aclosing(self._client.propose(member, count, self._first_seed(member))) as proposals:
            async for candidate in proposals:
                self._done += 1
                yield Progress(
                    kind="candidate",
                    model=member.model,
                    done=self._done,
                    total=self._total,
                    index=candidate.index,
                    tokens=len(candidate.delta.tokens),
                    log_likelihood=candidate.log_likelihood,
                    text=self._shown(candidate),
                )

    def _first_seed(self, member: Participant) -> int:
        """Index of the seed of the member's first candidate, among those that follow from the request's."""
        return self._members.index(member) * self._options.candidates

    def _shown(self, candidate: Candidate) -> str | None:
        """Return the candidate's text as it is shown to a writer; None: there is no writer."""
        return None

    def _spent(self) -> Statistics:
        """Return the statistics of all candidates. Of the prompt, what was cached for all counts as cached."""
        statistics = [candidate.delta.statistics for candidate in self._candidates]
        cached = min((each.cached for each in statistics), default=0)
        return replace(sum(statistics, Statistics()), cached=cached)

    def _report(self, member: Participant, *, votes: int | None = None) -> MemberReport:
        return MemberReport(
            model=member.model,
            weight=self._weights()[member.model],
            candidates=len(member.candidates),
            prompt_tokens=len(member.request.prompt),
            tokens=sum(len(candidate.delta.tokens) for candidate in member.candidates),
            votes=votes,
            agreement=None if votes is None else votes / max(len(member.candidates), 1),
            latency_s=member.latency_s,
            error=None if member.error is None else str(member.error),
        )
