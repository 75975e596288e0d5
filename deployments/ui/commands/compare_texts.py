"""The same prompts through each member alone, through self-consistency and through the ensemble, and how good that is.

Runs everything in this process, one contestant after the other, without Ray. Knows nothing of how findings are shown.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from decoding.blending.ensemble_options import EnsembleOptions
from deployments.admission.admission import Limits
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.strategies.candidate import join_deltas
from deployments.strategies.deliberation import Deliberation
from deployments.strategies.merging import merge_streams
from deployments.strategies.options import StrategyOptions
from deployments.strategies.progress import Outcome
from deployments.strategies.proposals import MemberClient, Run
from evaluation.metrics import TextMetrics, measure

_SCORING_TIMEOUT_S = 600.0
_NO_LIMIT = 1_000_000  # requests; all wait for their turn
_RUNNING = 32  # at once, of one model


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to answer."""

    name: str
    answer: Callable[[Sequence[Request]], Awaitable[list[Delta]]]  # to each request, whole


@dataclass(frozen=True, slots=True)
class Finding:
    """What a contestant wrote, and how fast."""

    name: str
    texts: Sequence[str]  # one per request
    metrics: Sequence[TextMetrics]  # of each; the likelihood is the first member's
    likelihoods: Sequence[Sequence[float]]  # of each text: nats per token by each member
    tokens_per_s: float  # of these texts; what was not chosen counts nothing


async def compare(
    coordinator: Coordinator,
    served: ServedEndpoint,
    requests: Sequence[Request],
    *,
    samples: int,
    report: Callable[[str], None],
) -> list[Finding]:
    """Every member alone, self-consistency of the first over so many samples, and the endpoint itself.

    Args:
        requests: the endpoint's; the same for all contestants, seeds included.
        report: is told what begins.

    Raises:
        ConsortError: a request was refused, or failed.
    """
    models = served.config.models
    limits = Limits(max_requests=_NO_LIMIT, running=dict.fromkeys(models, _RUNNING))
    service = Service({}, coordinator, limits=limits)
    contestants = [
        *(Contestant(f"{model} alone", _alone(service, model)) for model in models),
        Contestant(f"{models[0]}, {samples} samples", _consistent(service, served, models[0], samples)),
        Contestant(served.name, _endpoint(service, served)),
    ]
    findings = []
    for contestant in contestants:
        report(f"{contestant.name}: writing")
        await contestant.answer([_warm_up(requests[0])])
        began_s = time.perf_counter()
        deltas = await contestant.answer(requests)
        seconds = time.perf_counter() - began_s
        report(f"{contestant.name}: being judged")
        likelihoods = await _judged(service, models, requests, deltas)
        findings.append(
            Finding(
                contestant.name,
                [delta.text for delta in deltas],
                [
                    replace(measure(delta.tokens), log_likelihood=found[0])
                    for delta, found in zip(deltas, likelihoods, strict=True)
                ],
                likelihoods,
                sum(len(delta.tokens) for delta in deltas) / seconds,
            )
        )
    return findings


def _alone(service: Service, model: str) -> Callable[[Sequence[Request]], Awaitable[list[Delta]]]:
    async def answer(requests: Sequence[Request]) -> list[Delta]:
        return await _written(service.run, [_on_one(request, model) for request in requests])

    return answer


def _endpoint(service: Service, served: ServedEndpoint) -> Callable[[Sequence[Request]], Awaitable[list[Delta]]]:
    strategy = served.strategy

    async def blend(requests: Sequence[Request]) -> list[Delta]:
        return await _written(service.run, requests)

    async def choose(requests: Sequence[Request]) -> list[Delta]:
        assert strategy is not None
        return await _chosen(service, served.config.models, strategy, requests)

    return blend if strategy is None else choose


def _consistent(
    service: Service, served: ServedEndpoint, model: str, samples: int
) -> Callable[[Sequence[Request]], Awaitable[list[Delta]]]:
    """By the endpoint's own votes if it has any, else by minimum Bayes risk: free texts have no answers to count."""
    own = served.strategy
    strategy = own if own is not None and own.kind == "majority" else StrategyOptions(kind="mbr")

    async def answer(requests: Sequence[Request]) -> list[Delta]:
        alone = [_on_one(request, model) for request in requests]
        return await _chosen(service, [model], replace(strategy, candidates=samples), alone)

    return answer


async def _written(run: Run, requests: Sequence[Request]) -> list[Delta]:
    """The whole answer to each."""
    parts: list[list[Delta]] = [[] for _ in requests]
    async with aclosing(run([_fresh(request) for request in requests])) as batches:
        async for batch in batches:
            for index, delta in batch:
                parts[index].append(delta)
    return [join_deltas(part) for part in parts]


async def _chosen(
    service: Service, models: Sequence[str], strategy: StrategyOptions, requests: Sequence[Request]
) -> list[Delta]:
    """What each deliberation ends with."""
    deliberations = [Deliberation(one, models, strategy, service.run, service.ready_models) for one in requests]
    chosen: dict[int, Delta] = {}
    async with aclosing(merge_streams([one.events() for one in deliberations])) as events:
        async for index, event in events:
            if isinstance(event, Outcome):
                chosen[index] = event.delta
    return [chosen[index] for index in range(len(requests))]


async def _judged(
    service: Service, models: Sequence[str], requests: Sequence[Request], deltas: Sequence[Delta]
) -> list[list[float]]:
    """Of each text, nats per token by each member."""
    client = MemberClient(service.run, service.ready_models, _SCORING_TIMEOUT_S)

    async def judge(request: Request, delta: Delta) -> list[float]:
        return [(await client.judge(model, request, [delta.tokens]))[0] for model in models]

    return await asyncio.gather(*map(judge, requests, deltas))


def _on_one(request: Request, model: str) -> Request:
    """Plain decoding by one model, with the same parameters and seed."""
    endpoint = replace(request.endpoint, target=model, drafter=None, ngram=None, members=())
    return replace(request, endpoint=endpoint, ensemble=EnsembleOptions(member_timeout_s=_SCORING_TIMEOUT_S))


def _fresh(request: Request) -> Request:
    """Under a new id."""
    return Request(
        request.endpoint,
        request.prompt,
        request.params,
        speculate=request.speculate,
        draft_length=request.draft_length,
        ensemble=request.ensemble,
        timeout_s=request.timeout_s,
    )


def _warm_up(request: Request) -> Request:
    return replace(request, params=replace(request.params, max_tokens=8, min_tokens=0))
