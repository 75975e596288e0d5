"""Faults and updates on Ray Serve with several targets and drafters, under load from HTTP clients.

Slower than `benchmarks.chaos`, because Serve needs time to detect failures and to start processes: see
docs/failures.md. Ray is imported in functions, because its environment must be set before.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.chaos.__main__ import Findings, Pauses, as_text
from benchmarks.chaos.load import PROMPTS
from benchmarks.chaos.serve_clients import Clients, StreamRecord
from benchmarks.chaos.serve_faults import Kind, ServeFault, ServeFaultInjector, coordinator_pids, is_settled, wait_for
from benchmarks.report import write
from benchmarks.serving.servers import free_port
from cli.serving.cluster import serving
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config
from training.heldout import read_prompts

_BODIES: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.3},
)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a fault met."""

    streaming: int  # answers that had begun, and had not ended, when it came
    paused: int  # of these, those that paused or whose connection broke
    requests: int  # in progress at some time before everything had recovered


@dataclass(frozen=True, slots=True)
class Phase:
    """Faults in turn, and what came of the requests meanwhile."""

    findings: Findings
    faults: Sequence[ServeFault]
    hits: Sequence[Hit]
    resumed: int  # tries of clients to go on after a connection broke

    def as_text(self) -> str:
        """Describe the phase for people."""
        lines = [
            f"{fault.kind}: {hit.streaming} streams met it, {hit.paused} paused, {hit.requests} requests until recovery"
            for fault, hit in zip(self.faults, self.hits, strict=True)
        ]
        return "\n".join([as_text(self.findings), *lines, f"{self.resumed} tries to resume a stream"])

    def as_json(self) -> dict[str, object]:
        """Return the phase with what each fault met beside it."""
        injected = [asdict(fault) | asdict(hit) for fault, hit in zip(self.faults, self.hits, strict=True)]
        return asdict(self.findings) | {"resumed": self.resumed, "injected": injected}


@click.command()
@click.option("--kills", default=3, show_default=True, help="Of each role.")
@click.option("--hangs", default=1, show_default=True, help="Of each role.")
@click.option("--controller-kills", default=1, show_default=True, help="Of Serve's controller.")
@click.option(
    "--coordinator-kills", default=1, show_default=True, help="Kills of the only coordinator, and later of one of two."
)
@click.option("--proxy-kills", default=1, show_default=True, help="Kills of Serve's proxy; clients resume.")
@click.option(
    "--updates",
    default=1,
    show_default=True,
    help="Updates of each model and of the coordinators alone, and of all by a new configuration.",
)
@click.option(
    "--scalings", default=1, show_default=True, help="Of each model and of the coordinators: to one, and back to two."
)
@click.option("--streams", default=6, show_default=True)
@click.option("--prompts", default=20, show_default=True)
@click.option("--new-tokens", default=200, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos-serve.json"))
def main(
    kills: int,
    hangs: int,
    controller_kills: int,
    coordinator_kills: int,
    proxy_kills: int,
    updates: int,
    scalings: int,
    streams: int,
    prompts: int,
    new_tokens: int,
    output: Path,
) -> None:
    """Serve, send requests, kill, update, compare, print, and write JSON."""
    bodies = [
        {"model": "consort", "prompt": text, "max_tokens": new_tokens, "seed": seed, **_BODIES[seed % len(_BODIES)]}
        for seed, text in enumerate(read_prompts(PROMPTS)[:prompts])
    ]
    config = _config()
    replicas: list[Kind] = [*_times(kills, "kill"), *_times(hangs, "hang"), *["kill controller"] * controller_kills]
    alone: list[Kind] = ["kill coordinator"] * coordinator_kills
    everything: list[Kind] = ["update all"] * updates
    coordinators: list[Kind] = ["update coordinator"] * updates
    scaled: list[Kind] = [*_times(scalings, "scale"), *["scale coordinator"] * scalings]
    proxy: list[Kind] = ["kill proxy"] * proxy_kills
    phases: dict[str, Phase] = {}
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
        calm = Clients(config.http.url, bodies, streams)
        expected = [calm.ask(number) for number in range(len(bodies))]
        click.echo(f"{len(expected)} different requests answered without faults")
        injector = ServeFaultInjector(config)

        def run_phase(title: str, kinds: Sequence[Kind], *, resuming: bool = False) -> None:
            if kinds:
                with Clients(config.http.url, bodies, streams, resuming=resuming) as clients:
                    faults = [injector.inject(kind, lambda: clients.are_streaming(expected)) for kind in kinds]
                phases[title] = _judge(clients.records, expected, faults)
                click.echo(f"\n{title}\n{phases[title].as_text()}\n")

        run_phase("one coordinator", replicas)
        run_phase("one coordinator, killed", alone)
        if updates or coordinator_kills or scalings:
            injector.deploy()
            wait_for(lambda: len(coordinator_pids()) == 2 and is_settled())
        run_phase("one of two coordinators, killed", alone)
        run_phase("scaled down and up", scaled)
        run_phase("models updated one by one", _times(updates, "update"))
        run_phase("coordinators updated", coordinators)
        run_phase("proxy killed", proxy, resuming=True)
        run_phase("everything updated", everything)
    settings = {"streams": streams, "new_tokens": new_tokens}
    results = {title: phase.as_json() for title, phase in phases.items()}
    write(output, "benchmarks.chaos.serve", settings, phases=results)
    sys.exit(any(phase.findings.lost or phase.findings.differing for phase in phases.values()))


def _times(count: int, verb: str) -> list[Kind]:
    return [f"{verb} target", f"{verb} drafter"] * count


def _config() -> ServerConfig:
    config = load_config(TINY_CONFIG)
    config.http.port = free_port()
    for model in config.models.values():
        model.threads, model.replicas = 1, 2
    return config


def _judge(records: Sequence[StreamRecord], expected: Sequence[StreamRecord], faults: Sequence[ServeFault]) -> Phase:
    pauses: dict[str, list[float]] = {}
    gaps = [gap for record in records for gap in record.gaps]
    for fault in faults:
        seconds = [gap.ended_s - fault.at_s for gap in gaps if gap.began_s - 0.5 < fault.at_s < gap.ended_s]
        pauses.setdefault(fault.kind, []).append(max(seconds, default=0.0))
    lost = [record for record in records if record.error is not None]
    findings = Findings(
        requests=len(records),
        faults={fault.kind: sum(other.kind == fault.kind for other in faults) for fault in faults},
        lost=[_start_text(record, faults) + str(record.error) for record in lost],
        differing=[
            f"{record.texts} instead of {expected[record.number].texts}"
            for record in records
            if record.error is None and record.texts != expected[record.number].texts
        ],
        stalls={},
        pauses={kind: Pauses.summarize(seconds) for kind, seconds in pauses.items()},
    )
    return Phase(
        findings, faults, [_hit(records, fault) for fault in faults], sum(record.resumed for record in records)
    )


def _hit(records: Sequence[StreamRecord], fault: ServeFault) -> Hit:
    streaming = [record for record in records if record.is_streaming(fault.at_s)]
    recovered_s = fault.at_s + fault.back_s
    return Hit(
        streaming=len(streaming),
        paused=sum(record.has_paused(fault.at_s) for record in streaming),
        requests=sum(
            record.began_s < recovered_s and record.ended_s is not None and record.ended_s > fault.at_s
            for record in records
        ),
    )


def _start_text(record: StreamRecord, faults: Sequence[ServeFault]) -> str:
    """Describe when a request began, relative to the last fault before it; without one, to the first fault."""
    before = [fault for fault in faults if fault.at_s < record.began_s] or faults[:1]
    return f"begun {record.began_s - before[-1].at_s:+.1f} s after {before[-1].kind}: "


if __name__ == "__main__":
    main()
