"""Several models find one answer: all propose, the strategy chooses. Tells how far it is. Knows no HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from actors.coordinator.request import Request, Statistics
from decoding.errors import ConsortError, DeadlineError, UnavailableError
from deployments.strategies.candidate import Candidate
from deployments.strategies.merging import merged
from deployments.strategies.options import StrategyOptions
from deployments.strategies.progress import CandidateReport, MemberReport, Outcome, Progress
from deployments.strategies.proposals import Asking, Member, Run
from deployments.strategies.verdict import Verdict, by_score, majority, minimum_risk

Event = Progress | Outcome
Work = Callable[[Member], AsyncGenerator[Progress, None]]
_FAILURES = (UnavailableError, DeadlineError)  # a member's; any other error is the request's or the server's


class Deliberation:
    """Of one prompt. Weights, failure policy and time-outs are the request's `ensemble_options`."""

    def __init__(
        self,
        request: Request,
        models: Sequence[str],
        options: StrategyOptions,
        run: Run,
        ready: Callable[[], set[str]],
    ) -> None:
        """
        request: as the leader would get it; candidate 0 of the leader has its seed.
        models: the members', the leader's first.
        run, ready: see `Asking`.
        """
        self._request, self._options = request, options
        self._policy = request.ensemble_options
        self._members = [Member(model) for model in models]
        self._asking = Asking(run, ready, self._policy.member_timeout_s)
        self._ready = ready
        self._done = self._total = 0  # steps of the phase that runs

    async def events(self) -> AsyncGenerator[Event, None]:
        """Progress, then the outcome. Leaving early cancels what runs.

        Raises:
            ConsortError: a member failed and the policy is to fail, too few are left, or the request is at fault.
        """
        self._drop_absent()
        self._total = len(self._present) * self._options.candidates
        async with aclosing(self._gather(self._propose)) as proposals:
            async for event in proposals:
                yield event
        candidates = [candidate for member in self._present for candidate in member.candidates]
        judgements: dict[str, list[float]] = {}
        if self._options.kind == "rerank":
            self._total = len(candidates) * len([one for one in self._present if self._judges(one)])
            async with aclosing(self._gather(partial(self._judge, candidates, judgements))) as judging:
                async for event in judging:
                    yield event
        yield self._outcome(candidates, await asyncio.to_thread(self._choose, candidates, judgements))

    @property
    def _present(self) -> list[Member]:
        return [member for member in self._members if member.error is None]

    def _drop_absent(self) -> None:
        """Members without a replica are not asked, if the rest is enough."""
        ready = self._ready()
        for member in self._members:
            if member.model not in ready:
                self._fail(member, UnavailableError(f"member {member.model!r} has no replica"))

    async def _gather(self, work: Work) -> AsyncGenerator[Progress, None]:
        """What all present members' work tells, as it comes."""
        self._done = 0
        async with aclosing(merged([self._surviving(member, work) for member in self._present])) as steps:
            async for _, step in steps:
                yield step

    async def _surviving(self, member: Member, work: Work) -> AsyncGenerator[Progress, None]:
        """The member's work, or how it failed, if the others can go on without it."""
        try:
            async with aclosing(work(member)) as steps:
                async for step in steps:
                    yield step
        except _FAILURES as error:
            yield self._fail(member, error)

    def _fail(self, member: Member, error: ConsortError) -> Progress:
        """Go on without the member; raises UnavailableError if the policy, or what is left, does not allow that."""
        member.error = error
        if not self._policy.has_quorum([one.error is None for one in self._members]):
            raise UnavailableError(f"a member failed: {error}") from error
        self._policy.blend.member_weights([one.error is None for one in self._members])  # raises if none counts
        return Progress(kind="member_failed", model=member.model, done=self._done, total=self._total, error=str(error))

    def _judges(self, member: Member) -> bool:
        return self._options.judge in (None, member.model)

    async def _propose(self, member: Member) -> AsyncGenerator[Progress, None]:
        count = self._options.candidates
        proposals = self._asking.propose(member, self._request, count, self._members.index(member) * count)
        async with aclosing(proposals):
            async for candidate in proposals:
                self._done += 1
                yield Progress(
                    kind="candidate",
                    model=member.model,
                    done=self._done,
                    total=self._total,
                    index=candidate.index,
                    tokens=len(candidate.tokens),
                    log_likelihood=candidate.log_likelihood,
                )

    async def _judge(
        self, candidates: Sequence[Candidate], judgements: dict[str, list[float]], member: Member
    ) -> AsyncGenerator[Progress, None]:
        """Fill in what the member thinks of each candidate; what it thinks of its own it has said already."""
        if not self._judges(member):
            return
        found = [one.log_likelihood if one.member == member.model else None for one in candidates]
        texts = [one.tokens for one, known in zip(candidates, found, strict=True) if known is None and one.tokens]
        scores = iter(await self._asking.judge(member.model, self._request, texts) if texts else ())
        judgements[member.model] = [
            known if known is not None else next(scores) if one.tokens else float("-inf")
            for one, known in zip(candidates, found, strict=True)
        ]
        self._done += len(candidates)
        yield Progress(kind="scored", model=member.model, done=self._done, total=self._total)

    def _choose(self, candidates: Sequence[Candidate], judgements: dict[str, list[float]]) -> Verdict:
        likelihoods = [one.log_likelihood for one in candidates]
        shares = self._weights()
        weights = [shares[one.member] for one in candidates]
        match self._options.kind:
            case "rerank":
                if not judgements:
                    raise UnavailableError("a member failed: nobody is left who could judge")
                return by_score(_mean(judgements, shares), likelihoods)
            case "majority":
                return majority([self._options.extract(one.text) for one in candidates], weights, likelihoods)
            case "mbr":
                return minimum_risk([one.text for one in candidates], weights, likelihoods, self._options.utility)
            case "best_of":
                return by_score(likelihoods, likelihoods)

    def _weights(self) -> dict[str, float]:
        """What each member counts, of 1 in all."""
        shares = self._policy.blend.member_weights([member.error is None for member in self._members])
        return {member.model: share for member, share in zip(self._members, shares, strict=True)}

    def _outcome(self, candidates: Sequence[Candidate], verdict: Verdict) -> Outcome:
        winner = candidates[verdict.winner]
        spent = sum((one.delta.statistics for one in candidates), Statistics())
        answers = verdict.answers or [None] * len(candidates)
        return Outcome(
            delta=replace(winner.delta, statistics=spent),
            strategy=self._options.kind,
            winner=winner.member,
            agreement=verdict.agreement,
            votes=None if verdict.votes is None else dict(verdict.votes),
            members=[self._report(member, candidates, verdict) for member in self._members],
            candidates=[
                CandidateReport(
                    model=candidates[i].member,
                    index=candidates[i].index,
                    score=verdict.scores[i],
                    log_likelihood=candidates[i].log_likelihood,
                    tokens=len(candidates[i].tokens),
                    extracted=answers[i],
                )
                for i in verdict.ranking
            ],
        )

    def _report(self, member: Member, candidates: Sequence[Candidate], verdict: Verdict) -> MemberReport:
        votes: int | None = None
        if verdict.votes is not None:
            own = [
                answer for one, answer in zip(candidates, verdict.answers, strict=True) if one.member == member.model
            ]
            votes = sum(answer is not None and answer == verdict.answers[verdict.winner] for answer in own)
        return MemberReport(
            model=member.model,
            weight=self._weights()[member.model],
            candidates=len(member.candidates),
            tokens=sum(len(one.tokens) for one in member.candidates),
            votes=votes,
            agreement=None if votes is None else votes / max(len(member.candidates), 1),
            latency_s=member.latency_s,
            error=None if member.error is None else str(member.error),
        )


def _mean(judgements: dict[str, list[float]], shares: dict[str, float]) -> list[float]:
    """Of each candidate: what those who judged think of it, by their weights; a single judge's word counts whole."""
    total = sum(shares[model] for model in judgements) or 1.0
    weighed = [
        (shares[model] or (1.0 if len(judgements) == 1 else 0.0), scores) for model, scores in judgements.items()
    ]
    columns = zip(*(scores for _, scores in weighed), strict=True)
    return [
        sum(weight * score for (weight, _), score in zip(weighed, column, strict=True) if weight) / total
        for column in columns
    ]
