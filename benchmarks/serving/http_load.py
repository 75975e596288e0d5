"""`python -m benchmarks.serving.http_load`: disconnecting clients, overload and abuse, on a real server.

See docs/operation.md for results.
"""

from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.report import write
from benchmarks.serving.__main__ import PROMPTS
from benchmarks.serving.abuse import AbuseRound, measure_abuse
from benchmarks.serving.disconnects import Disconnects, measure_disconnects
from benchmarks.serving.http_server import Footprint, ServeProcess
from benchmarks.serving.overload import (
    Latencies,
    Overload,
    RequestTemplate,
    measure_capacity,
    measure_crowd,
    measure_overload,
)
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config

_MODEL = "consort"


@click.command(context_settings={"show_default": True})
@click.option("--clients", default=1000, help="Disconnecting clients per round; 0: skip that.")
@click.option("--rounds", default=2, help="Rounds of disconnecting clients.")
@click.option("--at-once", default=60, help="Concurrent connections of these clients.")
@click.option("--max-requests", type=int, help="`http.max_requests`; by default as the server has it.")
@click.option("--max-queue-wait", default=0.0, help="`http.max_queue_wait_s`; 0: half as long as an answer takes.")
@click.option("--slots", default=16, help="Of each model.")
@click.option("--overload", default=20.0, help="Offered load as a multiple of the capacity; 0: skip that.")
@click.option("--crowd", default=0.0, help="Clients per slot that obey `Retry-After`; 0: skip that.")
@click.option("--seconds", default=20.0, help="Of each load.")
@click.option("--new-tokens", default=128, help="Of each answer.")
@click.option("--abuse", default=0, help="Rounds of heavy and hostile requests.")
@click.option("--hostile", default=160, help="Such requests per round.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/http-load.json"))
def main(
    clients: int,
    rounds: int,
    at_once: int,
    max_requests: int | None,
    max_queue_wait: float,
    slots: int,
    overload: float,
    crowd: float,
    seconds: float,
    new_tokens: int,
    abuse: int,
    hostile: int,
    output: Path,
) -> None:
    """Serve, load, print, and write JSON."""
    config = _config(max_requests, max_queue_wait, slots)
    results: dict[str, object] = {}
    with ServeProcess(config, folder=output.parent) as server:
        if overload or crowd:
            template = RequestTemplate(server.url, _MODEL, PROMPTS, new_tokens)
            measure_capacity(template, at_once=slots, seconds=seconds / 4)
            capacity = measure_capacity(template, at_once=slots, seconds=seconds)
            loads: dict[str, Overload] = {}
            if overload:
                loads["overload"] = measure_overload(
                    template, per_s=overload * capacity.per_s, seconds=seconds, read_metrics=server.read_metrics
                )
            if crowd:
                loads["crowd"] = measure_crowd(
                    template, clients=round(crowd * slots), seconds=seconds, read_metrics=server.read_metrics
                )
            again = measure_capacity(template, at_once=slots, seconds=seconds)
            results |= {"at_capacity": [asdict(capacity), asdict(again)]}
            results |= {name: asdict(load) for name, load in loads.items()}
            click.echo(f"at capacity: {capacity}\nagain afterwards: {again}")
            for name, load in loads.items():
                click.echo(f"{name}: {_overload_text(load, capacity)}")
        if clients:
            disconnects = measure_disconnects(
                server, model=_MODEL, prompts=PROMPTS, clients=clients, rounds=rounds, at_once=at_once, new_tokens=256
            )
            results["disconnects"] = [asdict(result) for result in disconnects]
            click.echo("\n".join(map(_disconnects_text, disconnects)))
        if abuse:
            click.echo(_memory_text(server.footprint()))
            abused = measure_abuse(server, model=_MODEL, rounds=abuse, requests=hostile, at_once=at_once)
            results["abuse"] = [asdict(result) for result in abused]
            click.echo("\n".join(map(_abuse_text, abused)))
        results["footprint"] = asdict(server.footprint())
    settings: dict[str, object] = {
        "clients": clients,
        "rounds": rounds,
        "at_once": at_once,
        "overload": overload,
        "crowd": crowd,
        "seconds": seconds,
        "abuse": abuse,
        "hostile": hostile,
    }
    settings |= {"new_tokens": new_tokens, "server": config.model_dump(mode="json")}
    write(output, "benchmarks.serving.http_load", settings, **results)


def _config(max_requests: int | None, max_queue_wait: float, slots: int) -> ServerConfig:
    """Return the default configuration with a thread per model."""
    config = load_config(TINY_CONFIG)
    for model in config.models.values():
        model.threads, model.slots = 1, slots
    config.http.max_queue_wait_s = max_queue_wait
    if max_requests is not None:
        config.http.max_requests = max_requests
    return config


def _overload_text(load: Overload, capacity: Latencies) -> str:
    admitted = load.admitted
    lines = (
        f"{load.offered_per_s:.0f} requests/s offered, {admitted.per_s:.1f}/s answered, "
        f"{admitted.per_s / capacity.per_s:.2f} times those at capacity, {load.failed} failed",
        f"{load.refused} refused, p50 {load.refusal_p50_s:.2f} s, p99 {load.refusal_p99_s:.2f} s, "
        f"{load.without_retry_after} without Retry-After",
        f"admitted requests' p50 {admitted.p50_s:.2f} s, p99 {admitted.p99_s:.2f} s, "
        f"{admitted.p99_s / capacity.p99_s:.2f} times that at capacity",
        *(
            f"  {name}: clients {pair.seen:.4g}, /metrics {pair.told:.4g}, {pair.error:.2%} off"
            for name, pair in load.agreement.pairs().items()
        ),
    )
    return "\n".join(lines)


def _disconnects_text(result: Disconnects) -> str:
    before, after = result.before, result.after
    return (
        f"{result.clients} clients disconnected; idle after {result.freed_s} s; tasks {before.tasks} → "
        f"{after.tasks}, open files {before.open_files} → {after.open_files}\n"
        f"  MiB {before.resident_mib}\n    → {after.resident_mib}"
    )


def _abuse_text(result: AbuseRound) -> str:
    freed = "never" if result.freed_s is None else f"after {result.freed_s:.1f} s"
    return f"abuse: {result.statuses}, idle {freed}; {_memory_text(result.after)}"


def _memory_text(footprint: Footprint) -> str:
    return ", ".join(f"{name} {size:.0f} MiB" for name, size in footprint.resident_mib.items())


if __name__ == "__main__":
    main()
