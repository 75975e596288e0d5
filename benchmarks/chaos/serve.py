"""`make chaos` on the real thing: Ray Serve, several targets and drafters, HTTP clients, kills by process id, updates.

Slower than `benchmarks.chaos`: Serve needs time to notice failures and to start processes. See docs/failures.md.
Ray is imported in functions: its environment must be set before.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.chaos.__main__ import Findings, Pauses, as_text
from benchmarks.chaos.load import PROMPTS
from benchmarks.chaos.serve_clients import Clients, Heard
from benchmarks.chaos.serve_faults import Kind, Strike, Striker, coordinators, is_settled, wait
from benchmarks.report import write
from benchmarks.serving.servers import free_port
from deployments.cluster import serving
from deployments.configuration.config import ServerConfig, load_config
from training.heldout import read_prompts

_BODIES: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.3},
)


@click.command()
@click.option("--kills", default=3, show_default=True, help="Of each role.")
@click.option("--hangs", default=1, show_default=True, help="Of each role.")
@click.option("--controller-kills", default=1, show_default=True, help="Of Serve's controller.")
@click.option("--coordinator-kills", default=1, show_default=True, help="Of the only one, and later of one of two.")
@click.option("--updates", default=1, show_default=True, help="Of each model alone, and of all by a new configuration.")
@click.option("--streams", default=6, show_default=True)
@click.option("--prompts", default=20, show_default=True)
@click.option("--new-tokens", default=200, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos-serve.json"))
def main(
    kills: int,
    hangs: int,
    controller_kills: int,
    coordinator_kills: int,
    updates: int,
    streams: int,
    prompts: int,
    new_tokens: int,
    output: Path,
) -> None:
    """Serve, ask, kill, update, compare, print, and write JSON."""
    bodies = [
        {"model": "consort", "prompt": text, "max_tokens": new_tokens, "seed": seed, **_BODIES[seed % len(_BODIES)]}
        for seed, text in enumerate(read_prompts(PROMPTS)[:prompts])
    ]
    config = _config()
    replicas: list[Kind] = [*_times(kills, "kill"), *_times(hangs, "hang"), *["kill controller"] * controller_kills]
    alone: list[Kind] = ["kill coordinator"] * coordinator_kills
    everything: list[Kind] = ["update all"] * updates
    found: dict[str, tuple[Findings, list[Strike]]] = {}
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
        calm = Clients(config.http.url, bodies, streams)
        expected = [calm.ask(number) for number in range(len(bodies))]
        click.echo(f"{len(expected)} different requests answered without faults")
        striker = Striker(config)

        def phase(title: str, kinds: Sequence[Kind]) -> None:
            if kinds:
                with Clients(config.http.url, bodies, streams) as clients:
                    strikes = [striker.strike(kind) for kind in kinds]
                found[title] = _judge(clients.heard, expected, strikes), strikes
                click.echo(f"\n{title}\n{as_text(found[title][0])}\n")

        phase("one coordinator", replicas)
        phase("one coordinator, killed", alone)
        if updates or coordinator_kills:
            striker.deploy()
            wait(lambda: len(coordinators()) == 2 and is_settled())
        phase("models updated one by one", _times(updates, "update"))
        phase("one of two coordinators, killed", alone)
        phase("everything updated", everything)
    settings = {"streams": streams, "new_tokens": new_tokens}
    phases = {
        title: asdict(findings) | {"strikes": [asdict(strike) for strike in strikes]}
        for title, (findings, strikes) in found.items()
    }
    write(output, "benchmarks.chaos.serve", settings, phases=phases)
    lost = [title for title, (findings, strikes) in found.items() if findings.lost and not _may_lose(strikes)]
    sys.exit(bool(lost or any(findings.differing for findings, _ in found.values())))


def _times(count: int, verb: str) -> list[Kind]:
    return [f"{verb} target", f"{verb} drafter"] * count


def _may_lose(strikes: Sequence[Strike]) -> bool:
    """Whether a coordinator was killed or replaced: its streams may end with it."""
    return any(strike.kind in ("kill coordinator", "update all") for strike in strikes)


def _config() -> ServerConfig:
    config = load_config()
    config.http.port = free_port()
    for model in config.models.values():
        model.threads, model.replicas = 1, 2
    return config


def _judge(heard: Sequence[Heard], expected: Sequence[Heard], strikes: Sequence[Strike]) -> Findings:
    pauses: dict[str, list[float]] = {}
    gaps = [gap for one in heard for gap in one.gaps]
    for strike in strikes:
        ours = [gap.ended_s - strike.at_s for gap in gaps if gap.began_s - 0.5 < strike.at_s < gap.ended_s]
        pauses.setdefault(strike.kind, []).append(max(ours, default=0.0))
    lost = [one for one in heard if one.error is not None]
    return Findings(
        requests=len(heard),
        faults={strike.kind: sum(one.kind == strike.kind for one in strikes) for strike in strikes},
        lost=[_when(one, strikes) + str(one.error) for one in lost],
        differing=[
            f"{one.texts} instead of {expected[one.number].texts}"
            for one in heard
            if one.error is None and one.texts != expected[one.number].texts
        ],
        stalls={},
        pauses={kind: Pauses.of(seconds) for kind, seconds in pauses.items()},
    )


def _when(heard: Heard, strikes: Sequence[Strike]) -> str:
    """When a request that was lost began, by the last fault before it or, without one, by the first."""
    before = [strike for strike in strikes if strike.at_s < heard.began_s] or strikes[:1]
    return f"begun {heard.began_s - before[-1].at_s:+.1f} s after {before[-1].kind}: "


if __name__ == "__main__":
    main()
