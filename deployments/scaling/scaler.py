"""Scaling of a running application, through Serve: by its autoscaler with our policy, and by hand.

Serve has two ways to change how many replicas there are without a restart of others: its autoscaler, and a call for
external scalers that takes any number, 0 included. A model that is scaled by hand leaves the former for the latter.
"""

import asyncio
from dataclasses import asdict

from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from decoding.errors import UnavailableError
from deployments.scaling.options import ScalingConfig
from deployments.scaling.policy import ScalingRules

_POLL_S, _POLLS = 0.1, 100
_ANSWER_S = 10.0  # the call waits for as long as Ray's head is dead


def autoscaling_config(scaling: ScalingConfig, rules: ScalingRules, replicas: int) -> AutoscalingConfig:
    """Serve's, for a deployment that `deployments.scaling.policy.scale` is to scale. replicas: to begin with."""
    return AutoscalingConfig(
        min_replicas=scaling.min,
        max_replicas=scaling.max,
        initial_replicas=max(scaling.min, min(replicas, scaling.max)),
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        look_back_period_s=scaling.look_back_s,
        policy=AutoscalingPolicy(policy_kwargs=asdict(rules)),
    )


async def set_replicas(app_name: str, deployment: str, count: int) -> None:
    """Have so many replicas from now on, whatever the load. Others are left alone.

    Raises:
        RayTaskError: the application was deployed without `external_scaler_enabled`.
        UnavailableError: Serve's controller does not answer; nothing is changed.
    """
    from ray.serve._private.common import DeploymentID  # the call is public over the dashboard's REST API only
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    controller = client._controller
    deployment_id = DeploymentID(name=deployment, app_name=app_name)
    try:
        applications = await asyncio.wait_for(controller.get_app_configs.remote(), _ANSWER_S)
    except TimeoutError as error:
        raise UnavailableError(f"Serve's controller has not answered for {_ANSWER_S:g} s; is Ray's head up?") from error
    if app_name in applications:  # from a file: what Serve remembers of it is to say the same
        applications[app_name] = with_fixed_count(applications[app_name], deployment, count)
        await controller.apply_config.remote(ServeDeploySchema(applications=list(applications.values())))
        for _ in range(_POLLS):  # Serve follows in its own time, and would undo what comes before
            if _is_fixed(await controller.get_deployment_config.remote(deployment_id), count):
                break
            await asyncio.sleep(_POLL_S)
    await controller.update_deployment_replicas.remote(deployment_id, count)


def _is_fixed(config: DeploymentConfig, count: int) -> bool:
    return config.autoscaling_config is None and config.num_replicas == max(1, count)


def with_fixed_count(application: ServeApplicationSchema, deployment: str, count: int) -> ServeApplicationSchema:
    """The same without autoscaling of the deployment; a file can't say 0, so 1 stands for that.

    Nothing else may change: a change of policies or arguments would restart everything.
    """
    changed = application.model_copy(deep=True)
    for one in changed.deployments:
        if one.name == deployment:
            one.num_replicas, one.autoscaling_config = max(1, count), None
            return changed
    changed.deployments.append(DeploymentSchema(name=deployment, num_replicas=max(1, count), autoscaling_config=None))
    return changed
