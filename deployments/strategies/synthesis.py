"""Members propose whole answers, and a writer writes the answer from theirs. Yields progress, then the writer's deltas.

Mixture of agents: Wang et al., arXiv 2406.04692. With several answers of one member: Li et al., arXiv 2502.00674.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from actors.coordinator.request import Delta, Request
from decoding.errors import UnavailableError
from deployments.strategies.members import Candidate, Participant, Run
from deployments.strategies.panel import CandidateReport, Outcome, Panel, Progress, WriterReport
from deployments.strategies.strategy import Proposal, StrategyOptions


class Composer(Protocol):
    """Writes what the members and the writer read, for one request."""

    request: Request  # for the writer, with the prompt as the client sent it

    def read(self, model: str, delta: Delta) -> str:
        """Return what a member's complete answer says, without its reasoning."""

    async def compose(self, proposals: Sequence[Proposal]) -> Request:
        """Return the writer's request; raises InvalidRequestError if its context has no room for the proposals."""


class Synthesis(Panel):
    """A panel whose members' answers become one. Members may have tokens of their own."""

    def __init__(
        self,
        requests: Sequence[Request],
        options: StrategyOptions,
        run: Run,
        ready: Callable[[], set[str]],
        composer: Composer,
    ) -> None:
        super().__init__(requests, options, run, ready)
        self._run, self._composer = run, composer
        self._texts: dict[Candidate, str] = {}

    async def events(self) -> AsyncGenerator[Progress | Delta | Outcome, None]:
        """Yield progress, then the writer's deltas, the last one in the outcome. Closing cancels what runs.

        Raises ConsortError as `Deliberation` does, or if the writer has no replica or fails.
        """
        async with aclosing(self._proposals()) as proposals:
            async for step in proposals:
                yield step
        shown = [Proposal(each.member, self._texts[each]) for each in self._candidates if self._texts[each]]
        request = replace(await self._composer.compose(shown), timeout_s=self._left_s)
        if request.endpoint.target not in self._ready():
            raise UnavailableError(f"the writer {request.endpoint.target!r} has no replica")
        began_s, written = time.monotonic(), 0
        async with aclosing(self._run([request])) as batches:
            async for batch in batches:
                for _, delta in batch:
                    written += len(delta.tokens)
                    if delta.finish is None:
                        yield delta
                    else:
                        yield self._outcome(request, delta, written, time.monotonic() - began_s)

    def _first_seed(self, member: Participant) -> int:
        """The first of the seeds is the writer's."""
        return 1 + super()._first_seed(member)

    def _shown(self, candidate: Candidate) -> str:
        self._texts[candidate] = self._composer.read(candidate.member, candidate.delta)
        return self._texts[candidate]

    def _outcome(self, request: Request, last: Delta, written: int, latency_s: float) -> Outcome:
        spent = self._spent()
        cached = min(spent.cached, last.statistics.cached, len(self._composer.request.prompt))
        return Outcome(
            delta=replace(last, statistics=replace(spent + last.statistics, cached=cached)),
            strategy=self._options.kind,
            writer=WriterReport(
                model=request.endpoint.target, prompt_tokens=len(request.prompt), tokens=written, latency_s=latency_s
            ),
            members=[self._report(member) for member in self._members],
            candidates=[
                CandidateReport(
                    model=candidate.member,
                    index=candidate.index,
                    score=None,
                    log_likelihood=candidate.log_likelihood,
                    tokens=len(candidate.delta.tokens),
                    text=self._texts[candidate],
                )
                for candidate in self._candidates
            ],
        )
