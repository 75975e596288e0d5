"""Faults and updates of an application on Ray Serve, by signals to processes and by redeployment.

Ray is imported in functions, because its environment must be set before.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import click
import psutil  # type: ignore[import-untyped]

from actors.replica.roles import Role
from deployments.configuration.config import ServerConfig
from engine.loading.host import compute_environment
from tests.chaos.findings import Fault

COUNT = 2  # replicas of everything
_ROLES: dict[str, Role] = {"target": "target", "drafter": "drafter"}  # by model
_RECOVERY_S = 240.0  # maximum time of a recovery
_STREAMING_POLL_S = 0.005


class Injector:
    """Injects faults into one application, and updates it."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._draft_length = 4
        self._updates: dict[str, int] = {}  # of each model, and of the coordinator
        self._counts: dict[str, int] = {}  # replicas of what was scaled

    def deploy(self) -> None:
        """Deploy with two coordinators, as `serve deploy` does. Actors of updated models get another environment."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from deployments.replicas.environment import APP_NAME, COORDINATOR, deployment_name

        names = {model: deployment_name(model, role) for model, role in _ROLES.items()} | {"coordinator": COORDINATOR}
        deployments: list[dict[str, Any]] = []
        for name, deployment in names.items():
            options: dict[str, Any] = {"num_replicas": self._counts.get(name, COUNT)}
            if name in self._updates:
                environment = compute_environment(1) | {"CONSORT_UPDATE": str(self._updates[name])}
                options["ray_actor_options"] = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
            deployments.append({"name": deployment, **options})
        content = self._config.model_dump(mode="json", exclude_unset=True)
        content["endpoints"]["consort"]["draft_length"] = self._draft_length
        application = {
            "name": APP_NAME,
            "import_path": "deployments.app:build",
            "args": {"config": content, "require_api_key": False},
            "external_scaler_enabled": True,
            "deployments": deployments,
        }
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def inject(self, kind: str, are_streaming: Callable[[], bool]) -> Fault:
        """Inject one fault or update, and wait until all replicas are ready again.

        kind: a verb, `kill`, `hang`, `update` or `scale`, and its object: a model or one of `_PIDS`.
        are_streaming: whether all clients are in the middle of an answer, which the fault waits for.
        """
        verb, name = kind.split()
        list_pids = _PIDS.get(name) or partial(_replica_pids, name)
        wait_for(is_settled)
        before = list_pids()
        time.sleep(2.0)
        at_s = wait_for(are_streaming, poll_s=_STREAMING_POLL_S)
        if verb == "scale":
            self._scale(name, 1)
            wait_for(lambda: len(set(list_pids()) & set(before)) == 1 and is_settled())
            self._scale(name, COUNT)
            back_s = wait_for(lambda: len(list_pids()) == COUNT and is_settled()) - at_s
        elif verb == "update":
            self._update(name)
            back_s = wait_for(lambda: not set(before) & set(list_pids()) and is_settled()) - at_s
        else:
            os.kill(before[0], signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            back_s = wait_for(lambda: len(set(list_pids()) - {before[0]}) >= len(before)) - at_s
        click.echo(f"{kind}: recovered after {back_s:.1f} s")
        time.sleep(3.0)
        return Fault(kind, kind, at_s, back_s=round(back_s, 1))

    def _scale(self, name: str, count: int) -> None:
        self._counts[name] = count
        self.deploy()

    def _update(self, name: str) -> None:
        """Redeploy one model or the coordinators, or all with another draft length, which does not change texts."""
        if name == "all":
            self._draft_length -= 1
        else:
            self._updates[name] = self._updates.get(name, 0) + 1
        self.deploy()


def is_settled() -> bool:
    """Whether Serve has all replicas, and none is starting or stopping."""
    from ray import serve

    from deployments.replicas.environment import APP_NAME

    status = serve.status().applications[APP_NAME]
    states = {str(state) for deployment in status.deployments.values() for state in deployment.replica_states}
    return status.status == "RUNNING" and states == {"RUNNING"}


def wait_for(condition: Callable[[], bool], *, poll_s: float = 0.2) -> float:
    """Wait until a condition holds. Returns that time on the monotonic clock."""
    end_s = time.monotonic() + _RECOVERY_S
    while not condition():
        if time.monotonic() > end_s:
            raise click.ClickException("the application did not recover")
        time.sleep(poll_s)
    return time.monotonic()


def _replica_pids(model: str) -> list[int]:
    """Return the process ids of a model's replicas; empty while any of them hangs."""
    from ray import serve

    from deployments.replicas.environment import APP_NAME, deployment_name
    from deployments.replicas.model_replica import ReplicaStatus

    handle = serve.get_deployment_handle(deployment_name(model, _ROLES[model]), APP_NAME)
    try:
        answers = handle.broadcast("status").results(timeout_s=5, return_exceptions=True)
    except Exception:  # none is up, or one hangs
        return []
    return sorted(answer.pid for answer in answers if isinstance(answer, ReplicaStatus))


def _titled_pids(*titles: str) -> list[int]:
    """Return the process ids of our Ray actors whose process title starts with one of these."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()[:1]).startswith(titles):
                pids.append(process.pid)
    return sorted(pids)


# The second is that of `consort serve`; what the driver deploys later replaces it.
_COORDINATORS = "ray::ServeReplica:consort:Coordinator", "ray::ServeReplica:consort:LocalCoordinator"
coordinator_pids = partial(_titled_pids, *_COORDINATORS)
_PIDS: dict[str, Callable[[], list[int]]] = {
    "coordinator": coordinator_pids,
    "controller": partial(_titled_pids, "ray::ServeController"),
    "proxy": partial(_titled_pids, "ray::ProxyActor"),
    "all": partial(_titled_pids, "ray::ServeReplica:consort:"),
}
