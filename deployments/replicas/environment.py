"""What Ray and Serve are told of replicas: names, resources, environment variables, and who gets requests."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.configuration.model import ModelConfig
from deployments.configuration.roles import Role
from engine.loading.host import compute_environment

APP_NAME = "consort"
COORDINATOR = "Coordinator"
LOCAL_COORDINATOR = "LocalCoordinator"  # of `consort serve`: proxies keep a router by name, and this needs another
LEDGER = "KeyLedger"
STANDBY_ROUTER = f"{__name__}:StandbyRouter"
_SWITCH_INTERVAL_S = 0.0005  # an event loop and a model loop share the interpreter; the default is 5 ms


def deployment_name(model: str, role: Role) -> str:
    """Return the name of a model's deployment in Serve."""
    return f"{role.capitalize()}-{model}"


def actor_options(model: ModelConfig) -> dict[str, Any]:
    """Return Ray's options for a replica of a model."""
    return {
        "num_cpus": model.num_cpus,
        "num_gpus": model.num_gpus or 0,
        "resources": model.resources,
        "runtime_env": runtime_env(model.threads, gpus=bool(model.num_gpus)),
    }


def runtime_env(threads: int | None, *, gpus: bool = False) -> dict[str, Any]:
    """Return Ray's runtime environment for a process.

    threads: of the CPU; None leaves it to Ray.
    gpus: whether Ray assigns it GPUs. Otherwise they are hidden here: Ray does not, and `device: auto` would take one.
    """
    return {"env_vars": compute_environment(threads) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def share_interpreter() -> None:
    """Let threads take turns often enough for an event loop beside a model's loop."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in the block without garbage collections, which take a sixth of the time; modules are permanent."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class StandbyRouter(FIFOMixin, RequestRouter):
    """Lets Serve's proxy send every request to one coordinator for as long as it is there; the others stand by.

    Proxies and handles that know the same replicas choose the same one, in whatever order Serve lists them. Serve
    pickles the class by value.
    """

    _serving: ReplicaID | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if self._serving not in by_id:
            self._serving = min(by_id, key=str)
        return [[by_id[self._serving]]]
