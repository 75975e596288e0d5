"""Answer the same prompts with each member alone, with self-consistency and with the ensemble, and measure the texts.

Runs in this process, one contestant after the other, without Ray.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from decoding.blending.params import EnsembleOptions
from deployments.admission.bounds import Limits
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.strategies.deliberation import Deliberation, Outcome
from deployments.strategies.members import MemberClient, Run, join_deltas, merge_streams
from deployments.strategies.strategy import StrategyOptions
from evaluation.metrics import TextMetrics, measure

_SCORING_TIMEOUT_S = 600.0
_NO_LIMIT = 1_000_000  # requests; all may wait
_RUNNING = 32  # requests of one model at once


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to answer."""

    name: str
    answer: Callable[[Sequence[Request]], Awaitable[list[Delta]]]  # complete answers, one per request


@dataclass(frozen=True, slots=True)
class Finding:
    """A contestant's texts, their measures, and its speed."""

    name: str
    texts: Sequence[str]  # one per request
    metrics: Sequence[TextMetrics]  # one per text; the likelihood is the first member's
    likelihoods: Sequence[Sequence[float]]  # [text][member], nats per token
    tokens_per_s: float  # of the chosen texts only


async def compare(
    coordinator: Coordinator,
    served: ServedEndpoint,
    requests: Sequence[Request],
    *,
    samples: int,
    report: Callable[[str], None],
) -> list[Finding]:
    """Measure every member alone, self-consistency of the first, and the endpoint itself.

    Args:
        requests: the endpoint's; the same for all contestants, with the same seeds.
        samples: candidates of self-consistency.
        report: called with each step that begins.

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
                    replace(measure(delta.token_ids), log_likelihood=by_member[0])
                    for delta, by_member in zip(deltas, likelihoods, strict=True)
                ],
                likelihoods,
                sum(len(delta.tokens) for delta in deltas) / seconds,
            )
        )
    return findings


def _alone(service: Service, model: str) -> Callable[[Sequence[Request]], Awaitable[list[Delta]]]:
    async def answer(requests: Sequence[Request]) -> list[Delta]:
        return await _written(service.run, [_plain_request(request, model) for request in requests])

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
    """Return self-consistency by the endpoint's votes if it has any, else by minimum Bayes risk."""
    own = served.strategy
    strategy = own if own is not None and own.kind == "majority" else StrategyOptions(kind="mbr")

    async def answer(requests: Sequence[Request]) -> list[Delta]:
        alone = [_plain_request(request, model) for request in requests]
        return await _chosen(service, [model], replace(strategy, candidates=samples), alone)

    return answer


async def _written(run: Run, requests: Sequence[Request]) -> list[Delta]:
    """Return the complete answer to each request."""
    parts: list[list[Delta]] = [[] for _ in requests]
    async with aclosing(run([_with_new_id(request) for request in requests])) as batches:
        async for batch in batches:
            for index, delta in batch:
                parts[index].append(delta)
    return [join_deltas(part) for part in parts]


async def _chosen(
    service: Service, models: Sequence[str], strategy: StrategyOptions, requests: Sequence[Request]
) -> list[Delta]:
    """Return the result of each request's deliberation."""
    deliberations = [Deliberation(request, models, strategy, service.run, service.ready_models) for request in requests]
    chosen: dict[int, Delta] = {}
    async with aclosing(merge_streams([deliberation.events() for deliberation in deliberations])) as events:
        async for index, event in events:
            if isinstance(event, Outcome):
                chosen[index] = event.delta
    return [chosen[index] for index in range(len(requests))]


async def _judged(
    service: Service, models: Sequence[str], requests: Sequence[Request], deltas: Sequence[Delta]
) -> list[list[float]]:
    """Return the log-likelihood of each text by each member, in nats per token."""
    client = MemberClient(service.run, service.ready_models, _SCORING_TIMEOUT_S)

    async def judge(request: Request, delta: Delta) -> list[float]:
        return [(await client.judge(model, request, [delta.token_ids]))[0] for model in models]

    return await asyncio.gather(*map(judge, requests, deltas))


def _plain_request(request: Request, model: str) -> Request:
    """Return a request for plain decoding by one model, with the same parameters and seed."""
    endpoint = replace(request.endpoint, target=model, drafter=None, ngram=None, members=())
    return replace(request, endpoint=endpoint, ensemble=EnsembleOptions(member_timeout_s=_SCORING_TIMEOUT_S))


def _with_new_id(request: Request) -> Request:
    """Return the same request with a new id."""
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
