"""`make chaos` on the real thing: Ray Serve with several targets and drafters, HTTP clients, and kills by process id.

Slower than `benchmarks.chaos`, because Serve takes its time to notice and to start processes: see docs/failures.md.
Ray is imported in functions: its environment must be set before.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from actors.replica import Role
from benchmarks.chaos import Findings, Pauses, as_text
from benchmarks.chaos_load import PROMPTS, Gap
from benchmarks.report import write
from benchmarks.serve_servers import free_port
from decoding.errors import ConsortError
from deployments.cluster import serving
from deployments.commands.client import Client
from deployments.configuration.config import ServerConfig, load_config
from training.heldout import read_prompts

Kind = Literal["kill target", "kill drafter", "hang target", "hang drafter", "kill coordinator"]

_ROLES: dict[str, Role] = {"target": "target", "drafter": "drafter"}  # of the models, by name
_BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.3},
)
_GAP_S = 0.3  # shorter ones are not kept
_BACK_S = 180.0  # for a replica to come back


@dataclass(slots=True)
class Heard:
    """What a client heard of one answer."""

    texts: dict[int, str]
    gaps: list[Gap]
    error: str | None = None


class Clients:
    """Threads that stream one completion after the other."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], count: int) -> None:
        self.heard: list[tuple[int, Heard]] = []
        self._client, self._bodies, self._next, self._stopping = Client(url), bodies, 0, False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def ask(self, number: int) -> Heard:
        """One answer."""
        heard, last_s = Heard({}, []), time.monotonic()
        try:
            for event in self._client.stream("/v1/completions", self._bodies[number] | {"stream": True}):
                now_s = time.monotonic()
                if now_s - last_s > _GAP_S:
                    heard.gaps.append(Gap(last_s, now_s))
                last_s = now_s
                for choice in event["choices"]:
                    heard.texts[choice["index"]] = heard.texts.get(choice["index"], "") + choice["text"]
        except ConsortError as error:
            heard.error = str(error)
        return heard

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                number, self._next = self._next % len(self._bodies), self._next + 1
            heard = self.ask(number)
            with self._lock:
                self.heard.append((number, heard))
            if heard.error is not None:
                time.sleep(0.5)


@click.command()
@click.option("--kills", default=3, show_default=True, help="Of each role.")
@click.option("--hangs", default=1, show_default=True, help="Of each role.")
@click.option("--coordinator-kills", default=1, show_default=True)
@click.option("--streams", default=6, show_default=True)
@click.option("--prompts", default=20, show_default=True)
@click.option("--new-tokens", default=200, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/chaos-serve.json"))
def main(
    kills: int, hangs: int, coordinator_kills: int, streams: int, prompts: int, new_tokens: int, output: Path
) -> None:
    """Serve, ask, kill, compare, print, and write JSON."""
    bodies = [
        {"model": "consort", "prompt": text, "max_tokens": new_tokens, "seed": seed, **_BODIES[seed % len(_BODIES)]}
        for seed, text in enumerate(read_prompts(PROMPTS)[:prompts])
    ]
    config = _config()
    kinds: list[Kind] = [*(["kill target", "kill drafter"] * kills), *(["hang target", "hang drafter"] * hangs)]  # type: ignore[list-item]
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
        clients = Clients(config.http.url, bodies, streams)
        expected = [clients.ask(number) for number in range(len(bodies))]
        click.echo(f"{len(expected)} different requests answered without faults")
        with clients:
            times = [(kind, *_strike(kind)) for kind in kinds]
        steady, clients = clients.heard, Clients(config.http.url, bodies, streams)
        with clients:
            broken = [_strike("kill coordinator") for _ in range(coordinator_kills)]
    findings = _judge(steady, expected, times)
    click.echo("\n" + as_text(findings))
    cut = [heard.error for _, heard in clients.heard if heard.error is not None]
    differing = sum(heard.error is None and heard.texts != expected[number].texts for number, heard in clients.heard)
    back = [seconds for _, seconds in broken]
    click.echo(f"\ncoordinator killed {len(broken)} times, back after {back} s: {len(clients.heard)} requests,")
    click.echo(f"{len(cut)} told of an error, {differing} differing\n" + "\n".join(sorted(set(cut))))
    coordinator = {"requests": len(clients.heard), "errors": cut, "differing": differing, "back_s": back}
    settings = {"kills": kills, "hangs": hangs, "streams": streams, "new_tokens": new_tokens}
    back_s = [{"kind": kind, "back_s": seconds} for kind, _, seconds in times]
    more = asdict(findings) | {"back": back_s, "coordinator": coordinator}
    write(output, [], "benchmarks.chaos_serve", settings, **more)
    sys.exit(bool(findings.lost or findings.differing or differing))


def _config() -> ServerConfig:
    config = load_config()
    config.http.port = free_port()
    for model in config.models.values():
        model.threads, model.replicas = 1, 2
    return config


def _strike(kind: Kind) -> tuple[float, float]:
    """One fault. Returns when, and how many seconds later there were as many sound processes again."""
    from deployments.app import deployment_name

    verb, role = kind.split()
    ask = _coordinators if role == "coordinator" else partial(_replicas, deployment_name(role, _ROLES[role]))
    before = ask()
    time.sleep(2.0)
    at_s = time.monotonic()
    os.kill(before[0], signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
    back_s = _wait(lambda: len(set(ask()) - {before[0]}) >= len(before)) - at_s
    click.echo(f"{kind}: back after {back_s:.1f} s")
    time.sleep(3.0)
    return at_s, back_s


def _wait(condition: Callable[[], bool]) -> float:
    """When it held, by the monotonic clock."""
    end_s = time.monotonic() + _BACK_S
    while not condition():
        if time.monotonic() > end_s:
            raise click.ClickException("a replica did not come back")
        time.sleep(0.2)
    return time.monotonic()


def _replicas(deployment: str) -> list[int]:
    """The process ids of the deployment's replicas that answer; none while one hangs."""
    from ray import serve

    from deployments.app import APP_NAME, ReplicaStatus

    handle = serve.get_deployment_handle(deployment, APP_NAME)
    try:
        answers = handle.broadcast("status").results(timeout_s=5, return_exceptions=True)
    except Exception:  # none is up, or one hangs
        return []
    return sorted(answer.pid for answer in answers if isinstance(answer, ReplicaStatus))


def _coordinators() -> list[int]:
    """The process ids of the coordinators, as Ray titles their processes."""
    from deployments.app import APP_NAME, COORDINATOR

    title = f"ray::ServeReplica:{APP_NAME}:{COORDINATOR}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended, or is no process
            pid = int(folder.name)
            if (folder / "cmdline").read_bytes().startswith(title):
                found.append(pid)
    return sorted(found)


def _judge(heard: list[tuple[int, Heard]], expected: list[Heard], times: list[tuple[Kind, float, float]]) -> Findings:
    pauses: dict[str, list[float]] = {}
    gaps = [gap for _, one in heard for gap in one.gaps]
    for kind, at_s, _ in times:
        ours = [gap.ended_s - at_s for gap in gaps if gap.began_s - 0.5 < at_s < gap.ended_s]
        pauses.setdefault(kind, []).append(max(ours, default=0.0))
    return Findings(
        requests=len(heard),
        faults={kind: sum(one[0] == kind for one in times) for kind, _, _ in times},
        lost=[one.error for _, one in heard if one.error is not None],
        differing=[
            f"{one.texts} instead of {expected[number].texts}"
            for number, one in heard
            if one.error is None and one.texts != expected[number].texts
        ],
        stalls={},
        pauses={kind: Pauses.of(seconds) for kind, seconds in pauses.items()},
    )


if __name__ == "__main__":
    main()
