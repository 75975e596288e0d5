"""Sets the number of replicas without restarting others.

Serve's autoscaler does it by our policy; scaling by hand switches to Serve's call for external scalers, from 0 on.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from decoding.errors import UnavailableError
from deployments.configuration.model import ScalingConfig
from deployments.configuration.roles import Role
from deployments.scaling.policy import ScalingRules

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeApplicationSchema

_ANSWER_TIMEOUT_S = 10.0  # without it, the call waits until Ray's head is back
_LOOK_BACK_S = 20.0  # over which Serve averages the load
_POLL_S, _POLLS = 0.1, 100


def autoscaling_config(
    scaling: ScalingConfig, role: Role, targets: Sequence[str], replicas: int
) -> "AutoscalingConfig":
    """Return Serve's options for scaling with `deployments.scaling.policy.scale`. A model in both roles is a target.

    targets: for a drafter, the deployments it drafts for.
    replicas: the initial number.
    """
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    rules = ScalingRules(
        "drafter" if role == "drafter" else "target",
        scaling.target_utilization,
        list(targets),
        ttft_s=(scaling.ttft_ms or 0) / 1000,
        tokens_per_s=scaling.tokens_per_s or 0,
    )
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

    Raises RayTaskError if the application was deployed without `external_scaler_enabled`; UnavailableError if Serve's
    controller does not answer; nothing is changed.
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
