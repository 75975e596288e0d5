"""Members propose and are judged, over a coordinator that makes answers up, and over real models in this process."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Endpoint, Request, Statistics
from actors.replica.in_process import Engine
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, UnavailableError
from decoding.sampling.params import SamplingParams
from deployments.endpoints.service import Service
from deployments.strategies.deliberation import Deliberation
from deployments.strategies.members import for_members
from deployments.strategies.panel import Outcome, Progress
from deployments.strategies.strategy import StrategyOptions, by_regex
from engine.model.runner import Runner
from tests.deployments.fake_coordinator import FakeCoordinator, answer
from tests.support.models import VOCAB, tiny_model

MODELS = ["target", "second", "third"]
MOST_TOKENS = 12


class Members(FakeCoordinator):
    """Some of them fail: at once, or after their first step, or never answer."""

    def __init__(self, **failing: ConsortError | None) -> None:
        super().__init__()
        self.ready = set(MODELS)
        self.failing = failing

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        self.requests.append(request)
        model = request.endpoint.target
        if model not in self.failing:
            for delta in answer(request):
                sink(delta)
            return
        error = self.failing[model]
        if error is not None:
            sink(replace(answer(request)[0], finish=None))
            sink(Delta("", (), Statistics(), error=error))


def request(**options: Any) -> Request:
    endpoint = Endpoint("e", "target", None, 0, decode=lambda ids: " ".join(map(str, ids)))
    return Request(
        endpoint,
        [7, 8, 9],
        SamplingParams(max_tokens=MOST_TOKENS, seed=3),
        ensemble=EnsembleOptions(**options),
    )


def deliberate(
    coordinator: Any, options: StrategyOptions, asked: Request, models: Sequence[str] = MODELS
) -> list[Progress | Outcome]:
    async def run() -> list[Progress | Outcome]:
        service = Service({}, coordinator)
        deliberation = Deliberation(for_members(asked, models), options, service.run, service.coordinator.models)
        async with aclosing(deliberation.events()) as events:
            return [event async for event in events]

    return asyncio.run(run())


def outcome(events: Sequence[Progress | Outcome]) -> Outcome:
    last = events[-1]
    assert isinstance(last, Outcome)
    return last


@pytest.mark.parametrize("kind", ["rerank", "majority", "mbr", "best_of"])
def test_all_propose_and_one_wins(kind: Any) -> None:
    coordinator = Members()
    events = deliberate(coordinator, StrategyOptions(kind=kind, candidates=2), request())
    proposals = [event for event in events if isinstance(event, Progress) and event.kind == "candidate"]
    assert [(event.done, event.total) for event in proposals] == [(i, 6) for i in range(1, 7)]
    assert {event.model for event in proposals} == set(MODELS)
    result = outcome(events)
    asked = [request for request in coordinator.requests if len(request.prompt) == 3]
    assert len({request.params.seed for request in asked}) == 6
    assert next(request.params.seed for request in asked if request.endpoint.target == "target") == 3
    assert result.strategy == kind
    assert len(result.candidates) == 6
    assert (result.candidates[0].model, result.candidates[0].tokens) == (result.winner, len(result.delta.tokens))
    assert result.delta.statistics.committed == sum(candidate.tokens for candidate in result.candidates)
    assert [(member.model, member.candidates) for member in result.members] == [(model, 2) for model in MODELS]
    assert sum(member.weight for member in result.members) == pytest.approx(1)
    assert (result.votes is None) == (kind != "majority")
    assert coordinator.cancelled == []


def test_votes_are_reported() -> None:
    def last_digit(text: str) -> str | None:
        return "odd" if int(text[-1]) % 2 else "even"

    result = outcome(deliberate(Members(), StrategyOptions(kind="majority", extract=last_digit), request()))
    assert result.votes is not None
    assert next(iter(result.votes)) == result.candidates[0].extracted
    won = sum(member.votes or 0 for member in result.members)
    assert result.agreement == pytest.approx(won / 12)
    assert all(member.agreement == (member.votes or 0) / 4 for member in result.members)
    nobody = StrategyOptions(kind="majority", extract=by_regex("no such", key="k"))
    assert outcome(deliberate(Members(), nobody, request())).agreement == 0


def test_a_judge_scores_alone() -> None:
    coordinator = Members()
    options = StrategyOptions(kind="rerank", candidates=2, judge="third")
    events = deliberate(coordinator, options, request(blend=BlendParams(weights=(1, 1, 0))))
    scoring = [request for request in coordinator.requests if len(request.prompt) > 3]
    assert [request.endpoint.target for request in scoring] == ["third"] * 4
    assert [event.model for event in events if isinstance(event, Progress) and event.kind == "scored"] == ["third"]
    scores = [candidate.score or 0.0 for candidate in outcome(events).candidates]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("error", [UnavailableError("gone"), DeadlineError("late"), None])
def test_a_member_that_fails_is_dropped(error: ConsortError | None) -> None:
    coordinator = Members(second=error)
    policy = {"on_member_failure": "drop", "min_members": 2, "member_timeout_s": 30 if error else 0.2}
    events = deliberate(coordinator, StrategyOptions(kind="rerank"), request(**policy))
    assert [event.model for event in events if isinstance(event, Progress) and event.error] == ["second"]
    result = outcome(events)
    assert [member.weight for member in result.members] == [0.5, 0, 0.5]
    assert [member.error is None for member in result.members] == [True, False, True]
    assert {candidate.model for candidate in result.candidates} == {"target", "third"}
    assert (coordinator.cancelled != []) == (error is None)


@pytest.mark.parametrize("policy", ["fail", "drop"])
def test_the_requests_own_time_limit_is_no_failure_of_a_member(policy: str) -> None:
    coordinator = Members(second=DeadlineError("late"))
    asked = replace(request(on_member_failure=policy), timeout_s=1e-6)
    with pytest.raises(DeadlineError, match=r"^timeout_s: the request took longer"):
        deliberate(coordinator, StrategyOptions(kind="rerank"), asked)


def test_judges_get_the_time_that_is_left() -> None:
    coordinator = Members()
    deliberate(coordinator, StrategyOptions(kind="rerank"), replace(request(), timeout_s=30.0))
    proposals = [asked.timeout_s or 0 for asked in coordinator.requests if asked.speculate]
    judgements = [asked.timeout_s or 0 for asked in coordinator.requests if not asked.speculate]
    assert 0 < max(judgements) < min(proposals) <= 30


def test_a_member_without_replica_is_not_asked() -> None:
    coordinator = Members()
    coordinator.ready = {"target", "third"}
    events = deliberate(coordinator, StrategyOptions(kind="best_of"), request(on_member_failure="drop"))
    assert {request.endpoint.target for request in coordinator.requests} == {"target", "third"}
    assert outcome(events).members[1].error == "member 'second' has no replica"


@pytest.mark.parametrize(
    ("failing", "policy", "error"),
    [
        ({"second": UnavailableError("gone")}, {}, UnavailableError),
        (
            {"second": UnavailableError("gone")},
            {"on_member_failure": "drop", "min_members": 3},
            UnavailableError,
        ),
        (
            {"second": UnavailableError("gone"), "third": UnavailableError("gone")},
            {"on_member_failure": "drop", "min_members": 2},
            UnavailableError,
        ),
        ({"third": InvalidRequestError("no", field="f")}, {"on_member_failure": "drop"}, InvalidRequestError),
    ],
)
def test_too_many_failures_end_it(
    failing: dict[str, ConsortError], policy: dict[str, Any], error: type[ConsortError]
) -> None:
    with pytest.raises(error):
        deliberate(Members(**failing), StrategyOptions(kind="best_of"), request(**policy))


def test_leaving_early_cancels_what_runs() -> None:
    coordinator = Members(target=None, second=None)

    async def run() -> None:
        service = Service({}, coordinator)  # type: ignore[arg-type]
        options = StrategyOptions(kind="best_of", candidates=2)
        deliberation = Deliberation(for_members(request(), MODELS), options, service.run, service.coordinator.models)
        async with aclosing(deliberation.events()) as events:
            await anext(events)

    asyncio.run(run())
    assert len(coordinator.cancelled) == 4


def test_scores_are_those_of_plain_forwards() -> None:
    models = {"target": tiny_model("llama-gqa"), "second": tiny_model("qwen3")}
    runners = {
        name: ("target", Runner(model, slots=8, max_length=3 + MOST_TOKENS, max_query=64))
        for name, model in models.items()
    }
    asked = request()
    with Engine(runners) as engine:  # type: ignore[arg-type]
        coordinator: Coordinator = engine.coordinator
        while engine.coordinator.models() != set(models):
            pass
        events = deliberate(coordinator, StrategyOptions(kind="rerank", candidates=3), asked, list(models))
    result = outcome(events)
    text = torch.tensor([[*asked.prompt, *result.delta.token_ids]])
    with torch.no_grad():
        likelihoods = [
            model(text).logits[0, 2:-1].log_softmax(-1).gather(-1, text[0, 3:, None]).mean().item()
            for model in models.values()
        ]
    assert text.max() < VOCAB
    assert result.candidates[0].score == pytest.approx(sum(likelihoods) / 2, abs=1e-4)
    assert result.candidates[0].log_likelihood in [pytest.approx(likelihood, abs=1e-4) for likelihood in likelihoods]
    assert len(result.delta.tokens) == MOST_TOKENS
