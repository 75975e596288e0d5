"""Asks Serve's controller how many replicas run, and sets their number without restarting others.

Serve's autoscaler does it by our policy; scaling by hand switches to Serve's call for external scalers, from 0 on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from decoding.errors import UnavailableError
from deployments.configuration.model import ScalingConfig
from deployments.configuration.roles import Role
from deployments.scaling.policy import ScalingRules

if TYPE_CHECKING:  # Ray takes a second to import, and the server's status has to know `Placement` only
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeApplicationSchema

_STATUS_TIMEOUT_S = 2.0  # while Ray's head is away, the server's status must not wait for it
_ANSWER_TIMEOUT_S = 10.0  # without it, the call waits until Ray's head is back
_LOOK_BACK_S = 20.0  # over which Serve averages the load
_POLL_S, _POLLS = 0.1, 100
_FAILED = ("UNHEALTHY", "DEPLOY_FAILED")


@dataclass(frozen=True, slots=True)
class Placement:
    """A deployment's replicas. reason: why fewer run than are wanted; None where as many run."""

    wanted: int
    running: int
    reason: str | None = None


async def placements(app_name: str, deployments: Mapping[str, str]) -> dict[str, Placement]:
    """Return the placement of each model. Empty while Serve's controller does not answer. deployments: by model."""
    from ray.serve.context import _get_global_client  # public only in the dashboard's REST API

    try:
        client = _get_global_client()
        assert client is not None
        call = client._controller.get_serve_instance_details.remote()
        details = await asyncio.wait_for(call, _STATUS_TIMEOUT_S)
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


def autoscaling_config(
    scaling: ScalingConfig, role: Role, targets: Sequence[str], replicas: int
) -> "AutoscalingConfig":
    """Return Serve's options for scaling with `deployments.scaling.policy.scale`. A model in both roles is a target.

    targets: for a drafter, the deployments it drafts for.
    replicas: the initial number.
    """
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    rules = ScalingRules("drafter" if role == "drafter" else "target", scaling.target_utilization, list(targets))
    return AutoscalingConfig(
        min_replicas=scaling.min,
        max_replicas=scaling.max,
        initial_replicas=max(scaling.min, min(replicas, scaling.max)),
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_kwargs=asdict(rules)),
    )


async def set_replicas(app_name: str, deployment: str, count: int) -> None:
    """Set a deployment's number of replicas, whatever the load. Other deployments stay as they are.

    Raises:
        RayTaskError: the application was deployed without `external_scaler_enabled`.
        UnavailableError: Serve's controller does not answer; nothing is changed.
    """
    from ray.serve._private.common import DeploymentID  # public only in the dashboard's REST API
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None
    controller = client._controller
    deployment_id = DeploymentID(name=deployment, app_name=app_name)
    try:
        applications = await asyncio.wait_for(controller.get_app_configs.remote(), _ANSWER_TIMEOUT_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"Serve's controller has not answered for {_ANSWER_TIMEOUT_S:g} s; is Ray's head up?"
        ) from error
    if app_name in applications:  # deployed from a file: update Serve's copy of it, too
        applications[app_name] = with_fixed_count(applications[app_name], deployment, count)
        await controller.apply_config.remote(ServeDeploySchema(applications=list(applications.values())))
        for _ in range(_POLLS):  # Serve applies it later, and would overwrite an earlier change
            config = await controller.get_deployment_config.remote(deployment_id)
            if config.autoscaling_config is None and config.num_replicas == max(1, count):
                break
            await asyncio.sleep(_POLL_S)
    await controller.update_deployment_replicas.remote(deployment_id, count)


def with_fixed_count(application: "ServeApplicationSchema", deployment: str, count: int) -> "ServeApplicationSchema":
    """Return the application with a fixed number for the deployment. A file can't have 0, so it gets 1 then.

    Nothing else may change: a change of policies or arguments would restart everything.
    """
    from ray.serve.schema import DeploymentSchema

    changed = application.model_copy(deep=True)
    for schema in changed.deployments:
        if schema.name == deployment:
            schema.num_replicas, schema.autoscaling_config = max(1, count), None
            return changed
    changed.deployments.append(DeploymentSchema(name=deployment, num_replicas=max(1, count), autoscaling_config=None))
    return changed
