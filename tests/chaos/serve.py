"""Faults and updates on Ray Serve with several targets and drafters, under load from OpenAI's client."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import openai

from benchmarks.models import HELD_OUT
from benchmarks.processes import free_port
from benchmarks.report import write
from cli.serving.cluster import serving
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config
from evaluation.prompts import read_prompts
from tests.chaos.findings import Fault, as_text, judge
from tests.chaos.load import Case, Streams, Transcript, ask_into
from tests.chaos.serve_faults import COUNT, Injector, coordinator_pids, is_settled, wait_for

_BODIES: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.3},
)
_PATIENCE_S = 120.0  # for a server to answer again after a connection broke
_PAUSE_S = 0.5  # between tries
Body = dict[str, Any]
option = partial(click.option, show_default=True)


@click.command()
@option("--kills", default=3, help="Of each role.")
@option("--hangs", default=1, help="Of each role.")
@option("--controller-kills", default=1, help="Of Serve's controller.")
@option("--coordinator-kills", default=1, help="Kills of the only coordinator, and later of one of two.")
@option("--proxy-kills", default=1, help="Kills of Serve's proxy; clients resume.")
@option(
    "--updates", default=1, help="Updates of each model and of the coordinators, and of all by a new configuration."
)
@option("--scalings", default=1, help="Of each model and of the coordinators: to one, and back to two.")
@option("--streams", default=6)
@option("--prompts", default=20)
@option("--new-tokens", default=200)
@option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos-serve.json"))
def serve(**given: Any) -> None:
    """Serve, send requests, kill, update, compare, print, and write JSON."""
    options, config = SimpleNamespace(**given), _config()
    common = {"model": "consort", "max_tokens": options.new_tokens}
    cases = [
        Case("completion", seed, {**common, "prompt": text, "seed": seed, **_BODIES[seed % len(_BODIES)]})
        for seed, text in enumerate(read_prompts(HELD_OUT)[: options.prompts])
    ]
    both, coordinator = ("target", "drafter"), ("coordinator",)
    replicas = [*_times(options.kills, "kill", both), *_times(options.hangs, "hang", both)]
    replicas += _times(options.controller_kills, "kill", ("controller",))
    phases: dict[str, dict[str, object]] = {}
    with serving(config, address=None, watch=lambda progress: None):
        client = openai.OpenAI(base_url=f"{config.http.url}/v1", api_key="none", max_retries=0, timeout=300)
        expected = {case.number: ask_into(partial(_ask, client), case, Transcript()) for case in cases}
        click.echo(f"{len(expected)} different requests answered without faults")
        injector = Injector(config)

        def run_phase(title: str, kinds: Sequence[str], *, resuming: bool = False) -> None:
            if kinds:
                streams = Streams(partial(_ask_on if resuming else _ask, client), cases, options.streams)
                streams.start()
                faults = [injector.inject(kind, lambda: _all_streaming(streams, expected)) for kind in kinds]
                phases[title] = _report(title, streams.finish(), expected, faults)

        run_phase("one coordinator", replicas)
        run_phase("one coordinator, killed", _times(options.coordinator_kills, "kill", coordinator))
        if options.updates or options.coordinator_kills or options.scalings:
            injector.deploy()
            wait_for(lambda: len(coordinator_pids()) == COUNT and is_settled())
        run_phase("one of two coordinators, killed", _times(options.coordinator_kills, "kill", coordinator))
        run_phase("scaled down and up", _times(options.scalings, "scale", (*both, *coordinator)))
        run_phase("models updated one by one", _times(options.updates, "update", both))
        run_phase("coordinators updated", _times(options.updates, "update", coordinator))
        run_phase("proxy killed", _times(options.proxy_kills, "kill", ("proxy",)), resuming=True)
        run_phase("everything updated", _times(options.updates, "update", ("all",)))
    write(options.output, "tests.chaos", vars(options), phases=phases)
    sys.exit(any(phase["lost"] or phase["differing"] for phase in phases.values()))


def _times(count: int, verb: str, names: Sequence[str]) -> list[str]:
    return [f"{verb} {name}" for name in names] * count


def _config() -> ServerConfig:
    config = load_config(TINY_CONFIG)
    config.http.port = free_port()
    for model in config.models.values():
        model.threads, model.replicas = 1, COUNT
    return config


def _ask(client: openai.OpenAI, body: Body, answer: Transcript) -> None:
    """Stream a completion."""
    create: Any = client.completions.create  # its overloads name every argument
    for chunk in create(**_arguments(body)):
        _take(chunk.model_dump(), answer)


def _ask_on(client: openai.OpenAI, body: Body, answer: Transcript) -> None:
    """Stream a completion, over as many connections as it takes: each goes on after the last event that came."""
    last_id = "0"
    create: Any = client.completions.with_streaming_response.create
    while True:
        try:
            with create(**_arguments(body), extra_headers={"Last-Event-ID": last_id}) as response:
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        last_id = value
                    elif name == "data" and value == "[DONE]":
                        return
                    elif name == "data":
                        _take(json.loads(value), answer)
        except Exception as error:  # the client lets those of its HTTP library through, which depends on its version
            refused = isinstance(error, openai.APIStatusError) and not isinstance(error, openai.InternalServerError)
            if refused or time.monotonic() - answer.last_s > _PATIENCE_S:
                raise
        time.sleep(_PAUSE_S)


def _arguments(body: Body) -> dict[str, Any]:
    return {"model": body["model"], "prompt": body["prompt"], "extra_body": body, "stream": True}


def _take(event: dict[str, Any], answer: Transcript) -> None:
    answer.note_arrival()
    for choice in event["choices"]:
        answer.texts[choice["index"]] += choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish


def _all_streaming(streams: Streams[Body], expected: dict[int, Transcript]) -> bool:
    """Whether every client has some of an answer, and at least half of it is still to come."""
    return all(
        current is not None and 0 < current[1].length < expected[current[0].number].length / 2
        for current in streams.current
    )


def _report(
    title: str,
    answers: Sequence[tuple[Case[Body], Transcript]],
    expected: dict[int, Transcript],
    faults: Sequence[Fault],
) -> dict[str, object]:
    """Print what came of the requests of a phase and how many met each fault, and return it as JSON."""
    findings = judge(answers, expected, faults)
    click.echo(f"\n{title}\n{as_text(findings)}")
    injected = []
    for fault in faults:
        met = [each for _, each in answers if each.first_s and each.first_s < fault.at_s < each.last_s]
        paused = sum(each.error is not None or any(gap.contains(fault.at_s) for gap in each.gaps) for each in met)
        back_s = fault.at_s + fault.back_s
        meanwhile = sum(each.began_s < back_s and each.last_s > fault.at_s for _, each in answers)
        click.echo(f"{fault.kind}: {len(met)} streams met it, {paused} paused, {meanwhile} requests until recovery")
        injected.append(asdict(fault) | {"streaming": len(met), "paused": paused, "requests": meanwhile})
    return asdict(findings) | {"injected": injected}
