"""Faults and updates of an application on Ray Serve, by process id and by what `serve deploy` does.

Ray is imported in functions: its environment must be set before.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import psutil  # type: ignore[import-untyped]

from actors.model.thread_environment import compute_environment
from actors.replica.replica import Role
from deployments.configuration.config import ServerConfig

if TYPE_CHECKING:
    pass

# A verb, `kill`, `hang` or `update`, and what: a model, `coordinator`, `controller` or `all`.
Kind = str

_ROLES: dict[str, Role] = {"target": "target", "drafter": "drafter"}  # of the models, by name
_BACK_S = 180.0  # for a process to come back


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault or an update: when, by the monotonic clock, and after how many seconds all were sound, or new, again."""

    kind: Kind
    at_s: float
    back_s: float


class Striker:
    """Does harm to one application."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._draft_length = 4
        self._updates: dict[str, int] = {}  # of each model

    def deploy(self) -> None:
        """As `serve deploy` does, with two coordinators, and for each updated model's actors another environment."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from deployments.app import APP_NAME, COORDINATOR, deployment_name

        deployments: list[dict[str, Any]] = [{"name": COORDINATOR, "num_replicas": 2}]
        for model, count in self._updates.items():
            environment = compute_environment(1) | {"CONSORT_UPDATE": str(count)}
            options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
            deployments.append({"name": deployment_name(model, _ROLES[model]), "ray_actor_options": options})
        content = self._config.model_dump(mode="json", exclude_unset=True)
        content["endpoints"]["consort"]["draft_length"] = self._draft_length
        application = {
            "name": APP_NAME,
            "import_path": "deployments.app:build",
            "args": {"config": content, "require_api_key": False},
            "external_scaler_enabled": True,
            "deployments": deployments,
        }
        schema: ServeDeploySchema = ServeDeploySchema.model_validate({"applications": [application]})
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(schema)

    def strike(self, kind: Kind) -> Strike:
        """One fault or update, once all processes of the kind are new or sound again."""
        verb, what = kind.split()
        ask = _ASK.get(what) or partial(_replicas, what)
        wait(is_settled)
        before = ask()
        time.sleep(2.0)
        at_s = time.monotonic()
        if verb == "update":
            self._update(what)
            back_s = wait(lambda: not set(before) & set(ask()) and is_settled()) - at_s
        else:
            os.kill(before[0], signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            back_s = wait(lambda: len(set(ask()) - {before[0]}) >= len(before)) - at_s
        click.echo(f"{kind}: back after {back_s:.1f} s")
        time.sleep(3.0)
        return Strike(kind, at_s, round(back_s, 1))

    def _update(self, what: str) -> None:
        """of everything: by a new configuration, which leaves texts as they are."""
        if what == "all":
            self._draft_length -= 1
        else:
            self._updates[what] = self._updates.get(what, 0) + 1
        self.deploy()


def is_settled() -> bool:
    """Whether Serve has as many replicas as it wants, and none that comes or goes."""
    from ray import serve

    from deployments.app import APP_NAME

    status = serve.status().applications[APP_NAME]
    states = {str(state) for deployment in status.deployments.values() for state in deployment.replica_states}
    return status.status == "RUNNING" and states == {"RUNNING"}


def wait(condition: Callable[[], bool]) -> float:
    """When it held, by the monotonic clock."""
    end_s = time.monotonic() + _BACK_S
    while not condition():
        if time.monotonic() > end_s:
            raise click.ClickException("what was there before did not come back")
        time.sleep(0.2)
    return time.monotonic()


def _replicas(model: str) -> list[int]:
    """The process ids of the model's replicas that answer; none while one hangs."""
    from ray import serve

    from deployments.app import APP_NAME, ReplicaStatus, deployment_name

    handle = serve.get_deployment_handle(deployment_name(model, _ROLES[model]), APP_NAME)
    try:
        answers = handle.broadcast("status").results(timeout_s=5, return_exceptions=True)
    except Exception:  # none is up, or one hangs
        return []
    return sorted(answer.pid for answer in answers if isinstance(answer, ReplicaStatus))


def _titled(title: str) -> list[int]:
    """The process ids of our Ray's actors that it titles so; a title goes on with what the actor does."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()[:1]).startswith(title):
                found.append(process.pid)
    return sorted(found)


coordinators = partial(_titled, "ray::ServeReplica:consort:Coordinator")
_ASK: dict[str, Callable[[], list[int]]] = {
    "coordinator": coordinators,
    "controller": partial(_titled, "ray::ServeController"),
    "all": partial(_titled, "ray::ServeReplica:consort:"),
}
