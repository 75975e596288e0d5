"""Members propose whole answers and the strategy chooses one. Yields progress, then the outcome."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from actors.coordinator.request import Request
from decoding.errors import UnavailableError
from deployments.strategies.members import Participant, Run
from deployments.strategies.panel import CandidateReport, MemberReport, Outcome, Panel, Progress
from deployments.strategies.strategy import Ranking, StrategyOptions, by_score, majority, minimum_risk


class Deliberation(Panel):
    """A deliberation over one prompt. The members have the same tokens."""

    def __init__(
        self, requests: Sequence[Request], options: StrategyOptions, run: Run, ready: Callable[[], set[str]]
    ) -> None:
        super().__init__(requests, options, run, ready)
        self._judgements: dict[str, list[float]] = {}  # by judge: the log-likelihood of each candidate

    async def events(self) -> AsyncGenerator[Progress | Outcome, None]:
        """Yield progress, then the outcome. Closing the iterator cancels what runs.

        Raises ConsortError if too few members are left, or one failed that must not, or the request is at fault.
        """
        async with aclosing(self._proposals()) as proposals:
            async for step in proposals:
                yield step
        if self._options.kind == "rerank":
            self._done, self._total = 0, len(self._candidates) * sum(map(self._judges, self._present))
            async with aclosing(self._gather(self._judge)) as judgements:
                async for step in judgements:
                    yield step
        yield self._outcome(await asyncio.to_thread(self._choose))

    def _judges(self, member: Participant) -> bool:
        return self._options.judge in (None, member.model)

    async def _judge(self, member: Participant) -> AsyncGenerator[Progress, None]:
        """Fill in the member's log-likelihood of each candidate; those of its own candidates are known."""
        if not self._judges(member):
            return
        scores = {candidate: candidate.log_likelihood for candidate in member.candidates}
        others = [each for each in self._candidates if each.member != member.model and each.delta.tokens]
        if others:
            request = replace(member.request, timeout_s=self._left_s)
            likelihoods = await self._client.judge(request, [each.delta.token_ids for each in others])
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
            case _:
                return by_score(likelihoods, likelihoods)

    def _outcome(self, ranking: Ranking) -> Outcome:
        candidates = self._candidates
        winner = candidates[ranking.winner]
        answers = ranking.answers or [None] * len(candidates)
        return Outcome(
            delta=replace(winner.delta, statistics=self._spent()),
            strategy=self._options.kind,
            winner=winner.member,
            agreement=ranking.agreement,
            votes=None if ranking.votes is None else dict(ranking.votes),
            members=[self._judged(member, ranking) for member in self._members],
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

    def _judged(self, member: Participant, ranking: Ranking) -> MemberReport:
        votes: int | None = None
        if ranking.votes is not None:
            winning = ranking.answers[ranking.winner]
            answers = zip(self._candidates, ranking.answers, strict=True)
            own = [answer for candidate, answer in answers if candidate.member == member.model]
            votes = 0 if winning is None else own.count(winning)
        return self._report(member, votes=votes)


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
