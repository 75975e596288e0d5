"""How many replicas each model has, why not more, and why one was replaced: from Serve's controller and Ray's head."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_TIMEOUT_S = 2.0  # while Ray's head is away, the server's status must not wait for it
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Restart:
    """Why a replica had to be replaced."""

    at_s: float  # Unix time of its end
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """A deployment's replicas. reason: why fewer run than are wanted; None where as many run."""

    wanted: int
    running: int
    starting: int = 0  # on a node that has room for them
    unplaceable: int = 0
    reason: str | None = None
    last_restart: Restart | None = None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What Ray's head knows."""

    free: Sequence[Resources] = ()  # of each node
    unplaced: Sequence[tuple[Resources, int]] = ()  # what waits for a node, in copies
    stages: Mapping[str, str] = field(default_factory=dict)  # what starting replicas do, by deployment
    restarts: Mapping[str, Restart] = field(default_factory=dict)  # the last one, by deployment


class Placements:
    """Asks for the placement of all models. Called again and again; a call that hangs is not repeated."""

    def __init__(
        self, app_name: str, deployments: Mapping[str, str], read: Callable[[Sequence[str]], ClusterState]
    ) -> None:
        """
        deployments: by model.
        read: returns the state of the cluster for deployments. It may block and raise anything.
        """
        self._app_name, self._deployments = app_name, deployments
        self._read = partial(read, list(deployments.values()))
        self._reading: asyncio.Future[ClusterState] | None = None
        self._state = ClusterState()

    async def __call__(self) -> dict[str, Placement]:
        """Return the placement of each model. Empty while Serve's controller does not answer."""
        from ray.serve.context import _get_global_client  # public only in the dashboard's REST API

        try:
            client = _get_global_client()
            assert client is not None
            call = client._controller.get_serve_instance_details.remote()
            details = await asyncio.wait_for(call, _TIMEOUT_S)
        except Exception:  # what Ray raises is not documented
            return {}
        state = await self._cluster_state()
        known = details["applications"].get(self._app_name, {}).get("deployments", {})
        return {
            model: placement_of(name, known[name], state) for model, name in self._deployments.items() if name in known
        }

    async def _cluster_state(self) -> ClusterState:
        """Return the state, or the last one if Ray's head does not answer now."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().run_in_executor(None, self._read)
        try:
            self._state = await asyncio.wait_for(asyncio.shield(self._reading), _TIMEOUT_S)
        except Exception:  # as above
            self._reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
        return self._state


def placement_of(name: str, details: Mapping[str, Any], state: ClusterState) -> Placement:
    """Return a deployment's placement. details: as Serve's schema `DeploymentDetails` has them."""
    wanted, replicas = details["target_num_replicas"], details["replicas"]
    running = sum(replica["state"] == "RUNNING" for replica in replicas)
    starting = [replica for replica in replicas if replica["state"] == "STARTING"]
    needs = {resource: amount for resource, amount in details["required_resources"].items() if amount}
    waiting = sum(count for resources, count in state.unplaced if resources == needs)
    unplaceable = min(waiting, sum(not replica.get("node_id") for replica in starting))
    placed = len(starting) - unplaceable
    reasons = [
        *([f"{unplaceable} can't be placed: {_shortage(needs, state.free)}"] if unplaceable else []),
        *([f"{placed} starting: {state.stages.get(name, 'loading')}"] if placed else []),
    ]
    message = details["message"].strip()
    if details["status"] in _FAILED and message:
        reasons = [str(message.splitlines()[-1].strip())]
    reason = ("; ".join(reasons) or "not started yet") if running < wanted else None
    return Placement(wanted, running, placed, unplaceable, reason, state.restarts.get(name))


def _shortage(needs: Resources, free: Sequence[Resources]) -> str:
    """Say what the nodes lack."""
    left = {resource: sum(node.get(resource, 0) for node in free) for resource in needs}
    short = {resource: left[resource] for resource, amount in needs.items() if left[resource] < amount}
    if short:
        return f"each needs {_amounts(needs)}, and the cluster has {_amounts(short)} free"
    return f"each needs {_amounts(needs)} on one node, and none has that free"


def _amounts(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
