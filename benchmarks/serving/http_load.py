"""`python -m benchmarks.serving.http_load`: clients that hang up and clients that are too many, on a real server.

See docs/operation.md for what was found.
"""

from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.report import write
from benchmarks.serving.__main__ import PROMPTS
from benchmarks.serving.disconnects import Disconnects, measure_disconnects
from benchmarks.serving.http_server import ServeProcess
from benchmarks.serving.overload import Asking, Overload, at_capacity, crowded, overloaded
from deployments.configuration.config import ServerConfig, load_config

_MODEL = "consort"


@click.command(context_settings={"show_default": True})
@click.option("--clients", default=1000, help="That hang up, in each round; 0: leave that out.")
@click.option("--rounds", default=2, help="Of these.")
@click.option("--at-once", default=60, help="Of these, connected at the same time.")
@click.option("--max-requests", type=int, help="`http.max_requests`; by default as the server has it.")
@click.option("--slots", default=16, help="Of each model.")
@click.option("--overload", default=20.0, help="Requests offered, times those that can be answered; 0: leave that out.")
@click.option("--crowd", default=0.0, help="The same as clients per slot, who obey `Retry-After`; 0: leave that out.")
@click.option("--seconds", default=20.0, help="Of each load.")
@click.option("--new-tokens", default=128, help="Of each answer.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/http-load.json"))
def main(
    clients: int,
    rounds: int,
    at_once: int,
    max_requests: int | None,
    slots: int,
    overload: float,
    crowd: float,
    seconds: float,
    new_tokens: int,
    output: Path,
) -> None:
    """Serve, load, print, and write JSON."""
    config = _config(max_requests, slots)
    found: dict[str, object] = {}
    with ServeProcess(config, folder=output.parent) as server:
        if overload or crowd:
            asking = Asking(server.url, _MODEL, PROMPTS, new_tokens)
            at_capacity(asking, at_once=slots, seconds=seconds / 4)
            capacity = at_capacity(asking, at_once=slots, seconds=seconds)
            loads: dict[str, Overload] = {}
            if overload:
                loads["overload"] = overloaded(asking, per_s=overload * capacity.per_s, seconds=seconds)
            if crowd:
                loads["crowd"] = crowded(asking, clients=round(crowd * slots), seconds=seconds)
            again = at_capacity(asking, at_once=slots, seconds=seconds)
            found |= {"at_capacity": [asdict(capacity), asdict(again)]}
            found |= {name: asdict(load) for name, load in loads.items()}
            click.echo(f"at capacity: {capacity}\nagain afterwards: {again}")
            for name, load in loads.items():
                click.echo(f"{name}: {_overload_text(load, capacity.p99_s)}")
        if clients:
            left = measure_disconnects(
                server, model=_MODEL, prompts=PROMPTS, clients=clients, rounds=rounds, at_once=at_once, new_tokens=256
            )
            found["disconnects"] = [asdict(one) for one in left]
            click.echo("\n".join(map(_disconnects_text, left)))
        found["footprint"] = asdict(server.footprint())
    settings: dict[str, object] = {
        "clients": clients,
        "rounds": rounds,
        "at_once": at_once,
        "overload": overload,
        "crowd": crowd,
        "seconds": seconds,
    }
    settings |= {"new_tokens": new_tokens, "server": config.model_dump(mode="json")}
    write(output, "benchmarks.serving.http_load", settings, **found)


def _config(max_requests: int | None, slots: int) -> ServerConfig:
    """The bundled models on a thread each."""
    config = load_config()
    for model in config.models.values():
        model.threads, model.slots = 1, slots
    if max_requests is not None:
        config.http.max_requests = max_requests
    return config


def _overload_text(load: Overload, capacity_p99_s: float) -> str:
    admitted = load.admitted
    lines = (
        f"{load.offered_per_s:.0f} requests/s offered, {admitted.per_s:.1f}/s answered, {load.failed} failed",
        f"{load.refused} refused, p99 {load.refusal_p99_s:.2f} s, {load.without_retry_after} without Retry-After",
        f"admitted requests' p50 {admitted.p50_s:.2f} s, p99 {admitted.p99_s:.2f} s, "
        f"{admitted.p99_s / capacity_p99_s:.2f} times that at capacity",
    )
    return "\n".join(lines)


def _disconnects_text(left: Disconnects) -> str:
    before, after = left.before, left.after
    return (
        f"{left.clients} clients hung up: nothing in progress after {left.freed_s} s; tasks {before.tasks} → "
        f"{after.tasks}, open files {before.open_files} → {after.open_files}\n"
        f"  MiB {before.resident_mib}\n    → {after.resident_mib}"
    )


if __name__ == "__main__":
    main()
