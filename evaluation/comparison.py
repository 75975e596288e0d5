"""Compare an ensemble with its members alone and with self-consistency: texts, measures, and judgements in words.

All contestants answer the same prompts with the same seeds in this process, one after the other, without Ray.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request, new_request_id
from actors.replica.in_process import Engine
from actors.replica.roles import Role
from decoding.blending.params import EnsembleOptions
from decoding.errors import ConfigError
from deployments.admission.bounds import Limits
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.roles import roles_in
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.service import Service
from deployments.strategies.deliberation import Deliberation
from deployments.strategies.members import MemberClient, Run, for_members, join_deltas, merge_streams
from deployments.strategies.panel import Outcome
from deployments.strategies.strategy import StrategyOptions
from engine.loading.runners import load_runner
from engine.model.runner import Runner
from evaluation.metrics import TextMetrics, average, measure, metrics_table
from evaluation.workload import Report, Workload

_SCORING_TIMEOUT_S = 600.0
_NO_LIMIT = 1_000_000  # requests; all may wait
_RUNNING = 32  # requests of one model at once
_SIGNIFICANT = 2.0  # standard errors; a larger difference counts as significant

Answer = Callable[[Sequence[Request]], Awaitable[list[Delta]]]  # one way to answer: a whole answer for each request


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
    """Measure every member alone, self-consistency of the first, and the endpoint itself, with the same seeds.

    Self-consistency is by the endpoint's votes if it has any, else by minimum Bayes risk. samples: its candidates.
    """
    models = served.config.models
    limits = Limits(max_requests=_NO_LIMIT, running=dict.fromkeys(models, _RUNNING))
    service = Service({}, coordinator, limits=limits)
    first, own = models[0], served.strategy
    voting = own if own is not None and own.kind == "majority" else StrategyOptions(kind="mbr")
    contestants: dict[str, Answer] = {f"{model} alone": partial(_alone, service, model) for model in models}
    contestants[f"{first}, {samples} samples"] = partial(
        _consistent, service, first, replace(voting, candidates=samples)
    )
    contestants[served.name] = partial(_written, service.run) if own is None else partial(_chosen, service, models, own)
    findings = []
    for name, answer in contestants.items():
        report(f"{name}: writing")
        short = replace(requests[0].params, max_tokens=8, min_tokens=0)
        await answer([replace(requests[0], params=short)])  # warms up
        began_s = time.perf_counter()
        deltas = await answer(requests)
        seconds = time.perf_counter() - began_s
        report(f"{name}: being judged")
        likelihoods = await _judged(service, models, requests, deltas)
        metrics = [
            replace(measure(delta.token_ids), log_likelihood=by_member[0])
            for delta, by_member in zip(deltas, likelihoods, strict=True)
        ]
        tokens = sum(len(delta.token_ids) for delta in deltas)
        findings.append(Finding(name, [delta.text for delta in deltas], metrics, likelihoods, tokens / seconds))
    return findings


async def _alone(service: Service, model: str, requests: Sequence[Request]) -> list[Delta]:
    return await _written(service.run, [_plain_request(request, model) for request in requests])


async def _consistent(
    service: Service, model: str, strategy: StrategyOptions, requests: Sequence[Request]
) -> list[Delta]:
    """Return what votes, or minimum Bayes risk, choose of a model's own answers."""
    return await _chosen(service, [model], strategy, [_plain_request(request, model) for request in requests])


async def _written(run: Run, requests: Sequence[Request]) -> list[Delta]:
    parts: list[list[Delta]] = [[] for _ in requests]
    anew = [replace(request, request_id=new_request_id(), arrived_at_s=time.time()) for request in requests]
    async with aclosing(run(anew)) as batches:
        async for batch in batches:
            for index, delta in batch:
                parts[index].append(delta)
    return [join_deltas(part) for part in parts]


async def _chosen(
    service: Service, models: Sequence[str], strategy: StrategyOptions, requests: Sequence[Request]
) -> list[Delta]:
    deliberations = [
        Deliberation(for_members(request, models), strategy, service.run, service.coordinator.models)
        for request in requests
    ]
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
    client = MemberClient(service.run, service.coordinator.models, _SCORING_TIMEOUT_S)

    async def judge(request: Request, delta: Delta) -> list[float]:
        return [(await client.judge(each, [delta.token_ids]))[0] for each in for_members(request, models)]

    return await asyncio.gather(*map(judge, requests, deltas))


def _plain_request(request: Request, model: str) -> Request:
    """Return a request for plain decoding by one model, with the same parameters and seed."""
    endpoint = replace(request.endpoint, target=model, drafter=None, ngram=None, members=())
    return replace(request, endpoint=endpoint, ensemble=EnsembleOptions(member_timeout_s=_SCORING_TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of a measure between two contestants, text by text."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float], others: Sequence[float]) -> "Difference":
        """Return values − others, paired by prompt and seed."""
        gaps = [value - other for value, other in zip(values, others, strict=True)]
        return cls(fmean(gaps), stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else float("inf"))

    @property
    def significant(self) -> bool:
        return abs(self.mean) > _SIGNIFICANT * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A sentence, and whether the ensemble wins; None if the difference is not significant."""

    gains: bool | None
    sentence: str


def judge_measure(what: str, ensemble: str, best: str, difference: Difference) -> Judgement:
    """Judge a measure where higher is better. best: the best contestant without mixing."""
    if not difference.significant:
        return Judgement(None, f"{what}: {ensemble} and {best} can't be told apart ({difference}).")
    if difference.mean > 0:
        return Judgement(True, f"{what}: {ensemble} gains over {best} ({difference}).")
    return Judgement(False, f"{what}: mixing loses; {best} is better than {ensemble} ({difference}).")


def judge_speed(ensemble: str, tokens_per_s: float, slowest: str, slowest_tokens_per_s: float) -> Judgement:
    """Compare with the slowest member alone, the best possible speed of an ensemble without speculation."""
    ratio = tokens_per_s / slowest_tokens_per_s
    return Judgement(ratio >= 1, f"speed: {ensemble} writes {ratio:.2f} times as fast as {slowest}.")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all contestants wrote, and how the endpoint compares with the others."""

    workload: Workload
    settings: Mapping[str, object]
    findings: Sequence[Finding]
    judgements: Sequence[Judgement]

    @property
    def members(self) -> Sequence[str]:
        return self.workload.config.endpoints[self.workload.endpoint].models

    def document(self) -> dict[str, Any]:
        config, endpoint = self.workload.config, self.workload.endpoint
        return {
            "endpoint": endpoint,
            "configuration": config.endpoints[endpoint].model_dump(exclude_defaults=True),
            "models": {name: config.models[name].path for name in self.members},
            "prompts": list(self.workload.prompts),
            "contestants": [asdict(finding) | {"mean": asdict(average(finding.metrics))} for finding in self.findings],
            "judgements": [asdict(judgement) for judgement in self.judgements],
            "settings": dict(self.settings),
        }

    def show(self, console: Console) -> None:
        """Print a table of the contestants, and the judgements in words."""
        first, *others = self.members
        metrics = {finding.name: average(finding.metrics) for finding in self.findings}
        more = {
            finding.name: [
                *(f"{fmean([text[i] for text in finding.likelihoods]):.2f}" for i in range(1, len(self.members))),
                f"{finding.tokens_per_s:.1f}",
            ]
            for finding in self.findings
        }
        head = [*(f"by {model}" for model in others), "tokens/s"]
        intro = f"\n{len(self.findings[0].texts)} texts of each. Likelihood: nats per token by {first}, then by each "
        console.print(f"{intro}other member.\n", soft_wrap=True)
        console.print(metrics_table(metrics, more, head), markup=False, soft_wrap=True)
        console.print(
            "\nAgainst the best contestant without mixing (mean difference ± standard error):", soft_wrap=True
        )
        for judgement in self.judgements:
            mark = {True: "[green]✓[/]", False: "[yellow]✗[/]", None: "[dim]–[/]"}[judgement.gains]
            console.print(f"{mark} {judgement.sentence}", soft_wrap=True)


def measure_comparison(workload: Workload, *, seeds: int, samples: int, report: Report) -> Comparison:
    """Let all contestants answer every prompt with each seed, and judge their texts. samples: as in `compare`.

    Raises ConsortError if a model can't be loaded, or a prompt does not fit.
    """
    disable_progress_bar()
    served = load_endpoints(workload.config)[workload.endpoint]
    if served.config.vocabulary != "shared":
        raise ConfigError(f"endpoints.{served.name}.vocabulary: only members with the same tokens can be compared")
    if served.panel:
        raise ConfigError(f"endpoints.{served.name}.strategy: only a server has a writer; name another --endpoint")
    bodies = [
        CompletionRequest(
            model=served.name,
            prompt=[prompt],
            max_tokens=workload.new_tokens,
            temperature=workload.temperature,
            ignore_eos=True,  # so that all texts are of the same length
        )
        for prompt in workload.prompts
    ]
    requests = [request for seed in range(seeds) for body in bodies for request in served.prepare(body, seed=seed)]
    replicas: dict[str, tuple[Role, Runner]] = {}
    for name, role in roles_in([served.config]).items():
        report(f"{name}: loading")
        caches = 2 if role == "both" else 1
        replicas[name] = role, load_runner(workload.config.models[name].spec(name), caches=caches)
    with Engine(replicas) as engine:
        engine.wait_until_ready()
        findings = asyncio.run(compare(engine.coordinator, served, requests, samples=samples, report=report))
    return Comparison(
        workload,
        {"new_tokens": workload.new_tokens, "temperature": workload.temperature, "seeds": seeds, "samples": samples},
        findings,
        judge(findings, served.name, members=len(served.config.models)),
    )


def judge(findings: Sequence[Finding], endpoint: str, *, members: int) -> list[Judgement]:
    """Compare the endpoint with the best contestant without mixing, measure by measure.

    findings: the members', then self-consistency's, then the endpoint's.
    """
    *others, own = findings
    measures: list[tuple[str, Callable[[Finding], list[float]]]] = [
        ("likelihood, nats per token", lambda finding: [fmean(by_member) for by_member in finding.likelihoods]),
        ("bigram entropy, bits", lambda finding: [metrics.entropy_2 for metrics in finding.metrics]),
        ("distinct-2", lambda finding: [metrics.distinct_2 for metrics in finding.metrics]),
        ("freedom from repetition", lambda finding: [1 - metrics.repetition for metrics in finding.metrics]),
    ]
    judgements = []
    for what, values in measures:
        best = max(others, key=lambda finding: fmean(values(finding)))
        judgements.append(judge_measure(what, endpoint, best.name, Difference.of(values(own), values(best))))
    slowest = min(others[:members], key=lambda finding: finding.tokens_per_s)
    return [*judgements, judge_speed(endpoint, own.tokens_per_s, slowest.name, slowest.tokens_per_s)]
