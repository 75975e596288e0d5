"""Members propose whole answers and the strategy chooses one. Yields progress, then the outcome."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError, UnavailableError
from deployments.strategies.members import Candidate, MemberClient, Participant, Run, merge_streams
from deployments.strategies.strategy import Ranking, StrategyOptions, by_score, majority, minimum_risk

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


class Deliberation:
    """A deliberation over one prompt. The request's `ensemble_options` have weights, failure policy and time limits."""

    def __init__(
        self, request: Request, models: Sequence[str], options: StrategyOptions, run: Run, ready: Callable[[], set[str]]
    ) -> None:
        """
        request: for the leader, whose candidate 0 has its seed.
        models: the members' models, the leader's first.
        run, ready: see `MemberClient`.
        """
        self._request, self._options = request, options
        self._policy = request.ensemble_options
        self._members = [Participant(model) for model in models]
        self._client = MemberClient(run, ready, self._policy.member_timeout_s)
        self._ready = ready
        self._candidates: list[Candidate] = []
        self._judgements: dict[str, list[float]] = {}  # by judge: the log-likelihood of each candidate
        self._done = self._total = 0  # steps of the current phase
        self._deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s

    async def events(self) -> AsyncGenerator[Progress | Outcome, None]:
        """Yield progress, then the outcome. Closing the iterator cancels what runs.

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
        self._candidates = [candidate for member in self._present for candidate in member.candidates]
        if self._options.kind == "rerank":
            self._done, self._total = 0, len(self._candidates) * sum(map(self._judges, self._present))
            async with aclosing(self._gather(self._judge)) as judgements:
                async for step in judgements:
                    yield step
        yield self._outcome(await asyncio.to_thread(self._choose))

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
                raise DeadlineError(f"timeout_s: the request took longer than {self._request.timeout_s:g} s") from error
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

    def _judges(self, member: Participant) -> bool:
        return self._options.judge in (None, member.model)

    async def _propose(self, member: Participant) -> AsyncGenerator[Progress, None]:
        count = self._options.candidates
        proposals = self._client.propose(member, self._request, count, self._members.index(member) * count)
        async with aclosing(proposals):
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
                )

    async def _judge(self, member: Participant) -> AsyncGenerator[Progress, None]:
        """Fill in the member's log-likelihood of each candidate; those of its own candidates are known."""
        if not self._judges(member):
            return
        scores = {candidate: candidate.log_likelihood for candidate in member.candidates}
        others = [each for each in self._candidates if each.member != member.model and each.delta.tokens]
        if others:
            request = replace(self._request, timeout_s=self._left_s)
            likelihoods = await self._client.judge(member.model, request, [each.delta.token_ids for each in others])
            scores |= dict(zip(others, likelihoods, strict=True))
        self._judgements[member.model] = [scores.get(each, float("-inf")) for each in self._candidates]
        self._done += len(self._candidates)
        yield Progress(kind="scored", model=member.model, done=self._done, total=self._total)

    def _choose(self) -> Ranking:
        likelihoods = [candidate.log_likelihood for candidate in self._candidates]
        texts = [candidate.delta.text for candidate in self._candidates]
        shares = self._weights()
        weights = [shares[candidate.member] for candidate in self._candidates]
        match self._options.kind:
            case "rerank":
                if not self._judgements:
                    raise UnavailableError("a member failed: no member is left to judge the candidates")
                return by_score(_mean(self._judgements, shares), likelihoods)
            case "majority":
                return majority([self._options.extract(text) for text in texts], weights, likelihoods)
            case "mbr":
                return minimum_risk(texts, weights, likelihoods, self._options.utility)
            case "best_of":
                return by_score(likelihoods, likelihoods)

    def _outcome(self, ranking: Ranking) -> Outcome:
        candidates = self._candidates
        winner = candidates[ranking.winner]
        spent = sum((candidate.delta.statistics for candidate in candidates), Statistics())
        cached = min((candidate.delta.statistics.cached for candidate in candidates), default=0)
        answers = ranking.answers or [None] * len(candidates)
        return Outcome(
            delta=replace(winner.delta, statistics=replace(spent, cached=cached)),
            strategy=self._options.kind,
            winner=winner.member,
            agreement=ranking.agreement,
            votes=None if ranking.votes is None else dict(ranking.votes),
            members=[self._report(member, ranking) for member in self._members],
            candidates=[
                CandidateReport(
                    model=candidates[i].member,
                    index=candidates[i].index,
                    score=ranking.scores[i],
                    log_likelihood=candidates[i].log_likelihood,
                    tokens=len(candidates[i].delta.tokens),
                    extracted=answers[i],
                )
                for i in ranking.order
            ],
        )

    def _report(self, member: Participant, ranking: Ranking) -> MemberReport:
        votes: int | None = None
        if ranking.votes is not None:
            winning = ranking.answers[ranking.winner]
            answers = zip(self._candidates, ranking.answers, strict=True)
            own = [answer for candidate, answer in answers if candidate.member == member.model]
            votes = 0 if winning is None else own.count(winning)
        return MemberReport(
            model=member.model,
            weight=self._weights()[member.model],
            candidates=len(member.candidates),
            tokens=sum(len(candidate.delta.tokens) for candidate in member.candidates),
            votes=votes,
            agreement=None if votes is None else votes / max(len(member.candidates), 1),
            latency_s=member.latency_s,
            error=None if member.error is None else str(member.error),
        )


def _mean(judgements: Mapping[str, Sequence[float]], shares: Mapping[str, float]) -> list[float]:
    """Return each candidate's weighted mean over its judges. A single judge counts whatever its weight."""
    if len(judgements) == 1:
        return list(*judgements.values())
    weights = [shares[model] for model in judgements]
    columns = zip(*judgements.values(), strict=True)
    return [
        sum(weight * score for weight, score in zip(weights, column, strict=True) if weight) / (sum(weights) or 1.0)
        for column in columns
    ]
