"""Compare an ensemble's texts with those of its members, as a table and in words."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from actors.replica.roles import Role
from decoding.errors import ConfigError
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.roles import roles_in
from deployments.endpoints.loading import load_endpoints
from engine.model.runner import Runner
from evaluation.contestants import Finding, compare
from evaluation.metrics import average, metrics_table
from evaluation.workload import Report, Workload

_READY_S = 0.01
_SIGNIFICANT = 2.0  # standard errors; a larger difference counts as significant


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
        """Whether the difference is significant."""
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
        """Names of the endpoint's models."""
        return self.workload.config.endpoints[self.workload.endpoint].models

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
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
    """Let all contestants answer every prompt with each seed, and judge their texts.

    Args:
        seeds: texts for each prompt.
        samples: candidates of self-consistency.

    Raises:
        ConsortError: a model can't be loaded, or a prompt does not fit.
    """
    disable_progress_bar()
    served = load_endpoints(workload.config)[workload.endpoint]
    if served.config.vocabulary != "shared":
        raise ConfigError(f"endpoints.{served.name}.vocabulary: only members with the same tokens can be compared")
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
        replicas[name] = role, load_runner(workload.config.models[name].spec(name), role=role)
    with Engine(replicas) as engine:
        while not replicas.keys() <= engine.coordinator.models():  # it discovers them in its own thread
            engine.check()
            time.sleep(_READY_S)
        findings = asyncio.run(compare(engine.coordinator, served, requests, samples=samples, report=report))
    return Comparison(
        workload,
        {
            "new_tokens": workload.new_tokens,
            "temperature": workload.temperature,
            "seeds": seeds,
            "samples": samples,
        },
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
