"""How many replicas a deployment should have and has, and what the others wait for, as Serve's controller says it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANSWER_TIMEOUT_S = 2.0  # while Ray's head is away, the server's status must not wait for it
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")


@dataclass(frozen=True, slots=True)
class Placement:
    """A deployment's replicas. reason: why fewer run than are wanted; None where as many run."""

    wanted: int
    running: int
    reason: str | None = None


async def placements(app_name: str, deployments: Mapping[str, str]) -> dict[str, Placement]:
    """Return the placement of each model. Empty while Serve's controller does not answer.

    deployments: by model.
    """
    from ray.serve.context import _get_global_client  # public only in the dashboard's REST API

    try:
        client = _get_global_client()
        assert client is not None
        call = client._controller.get_serve_instance_details.remote()
        details = await asyncio.wait_for(call, _ANSWER_TIMEOUT_S)
    except Exception:  # what Ray raises is not documented
        return {}
    known = details["applications"].get(app_name, {}).get("deployments", {})
    return {model: placement_of(known[name]) for model, name in deployments.items() if name in known}


def placement_of(details: Mapping[str, Any]) -> Placement:
    """Return a deployment's placement. details: as Serve's schema `DeploymentDetails` has them."""
    wanted, replicas = details["target_num_replicas"], details["replicas"]
    running = sum(replica["state"] == "RUNNING" for replica in replicas)
    return Placement(wanted, running, _reason(details) if running < wanted else None)


def _reason(details: Mapping[str, Any]) -> str:
    """Say what the replicas that do not run wait for, or why they fail."""
    message = details["message"].strip()
    if details["status"] in _FAILED and message:
        return str(message.splitlines()[-1].strip())
    starting = [replica for replica in details["replicas"] if replica["state"] == "STARTING"]
    unplaced = sum(not replica.get("node_id") for replica in starting)
    if unplaced:
        needs = ", ".join(f"{amount:g} {name}" for name, amount in details["required_resources"].items() if amount)
        return f"{unplaced} not placed: no node has {needs or 'room'} free"
    return f"{len(starting)} loading" if starting else "not started yet"
