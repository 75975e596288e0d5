"""What Ray's head knows of the cluster: free resources, what waits for a node, why replicas have died."""

from collections.abc import Sequence
from typing import Any

import ray
from ray._private.state import actors  # the public API asks Ray's dashboard, which need not run
from ray.autoscaler.v2.sdk import get_cluster_status

from deployments.replicas.stages import failure_of, stage_of
from deployments.scaling.placement import ClusterState, Restart

_DETAIL = "Worker exit detail: "  # in Ray's message


def read_cluster(deployments: Sequence[str]) -> ClusterState:
    """Read the state of the cluster, for deployments by name. The call blocks while Ray's head is away."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [node.resource_usage for node in (*status.active_nodes, *status.idle_nodes) if node.resource_usage]
    demands = (*status.resource_demands.ray_task_actor_demand, *status.resource_demands.placement_group_demand)
    restarts = {name: Restart(*failure) for name in deployments if (failure := failure_of(name)) is not None}
    for actor in actors(actor_state_name="DEAD").values():
        deployment = actor["Name"].partition("#")[2].partition("#")[0]  # SERVE_REPLICA::application#deployment#id
        death = Restart(actor["EndTime"] / 1000, death_reason(actor["DeathCause"]))
        earlier = restarts.get(deployment)
        if deployment in deployments and death.reason and (earlier is None or earlier.at_s < death.at_s):
            restarts[deployment] = death
    return ClusterState(
        [{usage.resource_name: usage.total - usage.used for usage in node.usage} for node in nodes],
        [(dict(shape.bundle), shape.count) for demand in demands for shape in demand.bundles_by_count],
        {name: stage_of(name) for name in deployments},
        restarts,
    )


def death_reason(cause: Any) -> str:
    """Return why a process died by itself; "" if Serve ended it, or it never came up.

    cause: Ray's `ActorDeathCause`.
    """
    if cause.HasField("oom_context"):
        return "its node ran out of memory"
    context = cause.actor_died_error_context
    if context.reason == context.NODE_DIED:
        return "its node died"
    if context.reason != context.WORKER_DIED:
        return ""
    message = " ".join(context.error_message.partition(_DETAIL)[2].split())
    return f"its process died: {message.partition('. ')[0] or 'Ray does not say why'}"
