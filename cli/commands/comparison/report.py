"""`consort compare`: compare an ensemble's texts with those of its members, as a table and in words."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cli.commands.bench import reporting
from cli.commands.comparison.findings import Difference, Judgement, judge_measure, judge_speed
from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig, load_config
from deployments.configuration.roles import roles_in

if TYPE_CHECKING:
    from actors.coordinator.request import Request
    from cli.commands.comparison.texts import Finding
    from deployments.endpoints.endpoint import ServedEndpoint

_SLOTS = 16
_MAX_LENGTH = 512
_READY_S = 0.01


def configured_ensemble(path: Path, endpoint: str | None) -> tuple[ServerConfig, str]:
    """Return a configuration and its endpoint with members. endpoint: None for the first.

    Raises:
        ConfigError: the configuration is wrong, or has no such endpoint with members.
    """
    config = load_config(path)
    known = [name for name, settings in config.endpoints.items() if settings.kind in ("ensemble", "contrastive")]
    wanted = known[0] if endpoint is None and known else endpoint
    if wanted is None or wanted not in known:
        names = ", ".join(known) or "none"
        raise ConfigError(f"{path}: no endpoint {wanted or ''} with members; those with some: {names}")
    for model in config.models.values():
        model.slots, model.max_length = _SLOTS, min(model.max_length or _MAX_LENGTH, _MAX_LENGTH)
    return config, wanted


def run_compare(
    console: Console,
    config: ServerConfig,
    endpoint: str,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float,
    seeds: int,
    samples: int,
    as_json: bool,
) -> None:
    """Measure and print the results.

    Raises:
        ConsortError: a model can't be loaded, or a prompt does not fit.
    """
    from transformers.utils.logging import disable_progress_bar  # this and the next import torch, which takes seconds

    from deployments.endpoints.loading import load_endpoints

    disable_progress_bar()
    served = load_endpoints(config)[endpoint]
    if served.config.vocabulary != "shared":
        raise ConfigError(f"endpoints.{endpoint}.vocabulary: only members with the same tokens can be compared")
    requests = _requests(served, prompts, new_tokens=new_tokens, temperature=temperature, seeds=seeds)
    progress = Console(stderr=True, highlight=False) if as_json else console
    with reporting(progress) as report:
        findings = _measure(config, served, requests, samples=samples, report=report)
    judgements = judge(findings, endpoint, members=len(served.config.models))
    if as_json:
        settings = {"new_tokens": new_tokens, "temperature": temperature, "seeds": seeds, "samples": samples}
        document = _document(config, endpoint, prompts, findings, judgements)
        console.print_json(json.dumps(document | {"settings": settings}))
    else:
        _show(console, served, findings, judgements)


def judge(findings: Sequence["Finding"], endpoint: str, *, members: int) -> list[Judgement]:
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


def _requests(
    served: "ServedEndpoint", prompts: Sequence[str], *, new_tokens: int, temperature: float, seeds: int
) -> list["Request"]:
    """Return requests as the server makes them, all with the same answer length so that measures are comparable."""
    from deployments.requests.schema import CompletionRequest

    bodies = [
        CompletionRequest(
            model=served.name, prompt=[prompt], max_tokens=new_tokens, temperature=temperature, ignore_eos=True
        )
        for prompt in prompts
    ]
    return [request for seed in range(seeds) for body in bodies for request in served.prepare(body, seed=seed)]


def _measure(
    config: ServerConfig,
    served: "ServedEndpoint",
    requests: Sequence["Request"],
    *,
    samples: int,
    report: Callable[[str], None],
) -> list["Finding"]:
    from actors.replica.in_process import Engine
    from actors.replica.replica import load_runner
    from actors.replica.roles import Role
    from cli.commands.comparison.texts import compare
    from engine.model.runner import Runner

    roles = roles_in([served.config])
    replicas: dict[str, tuple[Role, Runner]] = {}
    for name, role in roles.items():
        report(f"{name}: loading")
        replicas[name] = role, load_runner(config.models[name].spec(name), role=role)

    with Engine(replicas) as engine:
        while not roles.keys() <= engine.coordinator.models():  # it discovers them in its own thread
            engine.check()
            time.sleep(_READY_S)
        return asyncio.run(compare(engine.coordinator, served, requests, samples=samples, report=report))


def _show(
    console: Console, served: "ServedEndpoint", findings: Sequence["Finding"], judgements: Sequence[Judgement]
) -> None:
    from evaluation.metrics import average
    from evaluation.table import metrics_table

    models = served.config.models
    metrics = {finding.name: average(finding.metrics) for finding in findings}
    more = {
        finding.name: [
            *(f"{fmean([text[i] for text in finding.likelihoods]):.2f}" for i in range(1, len(models))),
            f"{finding.tokens_per_s:.1f}",
        ]
        for finding in findings
    }
    head = [*(f"by {model}" for model in models[1:]), "tokens/s"]
    count = len(findings[0].texts)
    console.print(
        f"\n{count} texts of each. Likelihood: nats per token by {models[0]}, then by each other member.\n",
        soft_wrap=True,
    )
    console.print(metrics_table(metrics, more, head), markup=False, soft_wrap=True)
    console.print("\nAgainst the best contestant without mixing (mean difference ± standard error):", soft_wrap=True)
    for judgement in judgements:
        mark = {True: "[green]✓[/]", False: "[yellow]✗[/]", None: "[dim]–[/]"}[judgement.gains]
        console.print(f"{mark} {judgement.sentence}", soft_wrap=True)


def _document(
    config: ServerConfig,
    endpoint: str,
    prompts: Sequence[str],
    findings: Sequence["Finding"],
    judgements: Sequence[Judgement],
) -> dict[str, Any]:
    from evaluation.metrics import average

    return {
        "endpoint": endpoint,
        "configuration": config.endpoints[endpoint].model_dump(exclude_defaults=True),
        "models": {name: config.models[name].path for name in config.endpoints[endpoint].models},
        "prompts": list(prompts),
        "contestants": [asdict(finding) | {"mean": asdict(average(finding.metrics))} for finding in findings],
        "judgements": [asdict(judgement) for judgement in judgements],
    }
