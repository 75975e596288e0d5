"""A writer makes one answer of what members proposed: order, seeds, failures and counts, over made-up answers."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from actors.coordinator.request import Delta, Request
from decoding.errors import DeadlineError, UnavailableError
from deployments.endpoints.service import Service
from deployments.strategies.members import for_members
from deployments.strategies.panel import Outcome, Progress
from deployments.strategies.strategy import Proposal, StrategyOptions
from deployments.strategies.synthesis import Synthesis
from tests.deployments.strategies.test_deliberation import MODELS, Members, request

WRITER = "writer"


@dataclass
class FakeComposer:
    """Reads texts as they are; the writer's prompt says how many answers there were."""

    request: Request
    proposals: Sequence[Proposal] = ()

    def read(self, model: str, delta: Delta) -> str:
        return "" if model == "silent" else delta.text

    async def compose(self, proposals: Sequence[Proposal]) -> Request:
        self.proposals = proposals
        return replace(self.request, prompt=[*self.request.prompt, len(proposals)])


def synthesize(
    coordinator: Members, asked: Request, *, candidates: int = 1, models: Sequence[str] = MODELS
) -> tuple[list[Progress | Delta | Outcome], FakeComposer]:
    composer = FakeComposer(replace(asked, endpoint=replace(asked.endpoint, target=WRITER)))
    options = StrategyOptions(kind="synthesize", candidates=candidates)

    async def run() -> list[Progress | Delta | Outcome]:
        service = Service({}, coordinator)  # type: ignore[arg-type]
        panel = Synthesis(for_members(asked, models), options, service.run, service.coordinator.models, composer)
        async with aclosing(panel.events()) as events:
            return [event async for event in events]

    return asyncio.run(run()), composer


def members(*more: str, **failing: Any) -> Members:
    coordinator = Members(**failing)
    coordinator.ready = {*MODELS, WRITER, *more}
    return coordinator


def test_the_writer_follows_all_members() -> None:
    coordinator = members()
    events, composer = synthesize(coordinator, request(), candidates=2)
    kinds = [type(event) for event in events]
    assert kinds == [Progress] * 6 + [Delta] * (len(kinds) - 7) + [Outcome]
    outcome = events[-1]
    assert isinstance(outcome, Outcome)
    assert [(each.model, each.index) for each in outcome.candidates] == [(m, i) for m in MODELS for i in range(2)]
    assert [each.text for each in outcome.candidates] == [proposal.text for proposal in composer.proposals]
    writing = coordinator.requests[-1]
    assert (writing.endpoint.target, writing.prompt[-1], writing.params.seed) == (WRITER, 6, 3)
    assert len({each.params.seed for each in coordinator.requests}) == 7
    assert outcome.writer is not None
    deltas = [*(event for event in events if isinstance(event, Delta)), outcome.delta]
    assert outcome.writer.tokens == sum(len(delta.tokens) for delta in deltas)
    spent = outcome.writer.tokens + sum(candidate.tokens for candidate in outcome.candidates)
    assert outcome.delta.statistics.committed == spent
    assert outcome.delta.finish is not None


def test_what_the_writer_reads_does_not_depend_on_who_was_first() -> None:
    class Backwards(Members):
        """Answers to a member's requests in the reverse of their order."""

        def __init__(self) -> None:
            super().__init__()
            self.ready, self._held = {*MODELS, WRITER}, list[tuple[Any, Delta]]()

        def submit(self, request: Request, sink: Any) -> None:
            deltas: list[tuple[Any, Delta]] = []
            super().submit(request, lambda delta: deltas.append((sink, delta)))
            self._held[:0] = deltas
            if request.endpoint.target == WRITER or len({sink for sink, _ in self._held}) == 3:
                for late, delta in self._held:
                    late(delta)
                self._held.clear()

    _, forwards = synthesize(members(), request(), candidates=3)
    _, backwards = synthesize(Backwards(), request(), candidates=3)
    assert len(forwards.proposals) == 9
    assert forwards.proposals == backwards.proposals


@pytest.mark.parametrize("error", [UnavailableError("gone"), DeadlineError("late")])
def test_a_member_that_fails_is_not_read(error: Exception) -> None:
    coordinator = members(second=error)
    events, composer = synthesize(coordinator, request(on_member_failure="drop"))
    assert [proposal.model for proposal in composer.proposals] == ["target", "third"]
    outcome = events[-1]
    assert isinstance(outcome, Outcome)
    assert [member.error is None for member in outcome.members] == [True, False, True]
    with pytest.raises(UnavailableError, match="a member failed"):
        synthesize(members(second=error), request())


def test_empty_answers_are_not_shown() -> None:
    events, composer = synthesize(members("silent"), request(), models=["target", "silent"])
    assert [proposal.model for proposal in composer.proposals] == ["target"]
    outcome = events[-1]
    assert isinstance(outcome, Outcome)
    assert [candidate.text == "" for candidate in outcome.candidates] == [False, True]


def test_a_writer_without_replica_fails_the_request() -> None:
    coordinator = Members()
    with pytest.raises(UnavailableError, match="the writer 'writer' has no replica"):
        synthesize(coordinator, request(on_member_failure="drop"))


def test_a_writer_that_fails_fails_the_request() -> None:
    with pytest.raises(UnavailableError, match="gone"):
        synthesize(members(writer=UnavailableError("gone")), request(on_member_failure="drop"))


def test_the_writer_gets_the_time_that_is_left() -> None:
    coordinator = members()
    synthesize(coordinator, replace(request(), timeout_s=30.0))
    *proposing, writing = coordinator.requests
    assert writing.timeout_s is not None
    assert all(0 < writing.timeout_s < (each.timeout_s or 0) <= 30 for each in proposing)
