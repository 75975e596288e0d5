"""The other ranks of a tensor-parallel model: Ray actors beside the replica, which is rank 0.

Each has a bundle in the replica's placement group, and ends with it.
"""

import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec
    from engine.loading.tensor_parallel import Rank


class RankActor:
    """A rank other than 0."""

    def follow(self, spec: "ModelSpec", rank: "Rank") -> None:
        """Run the same forwards as rank 0 until it stops."""
        from engine.loading.tensor_parallel import follow_in_group

        follow_in_group(spec, rank)


def start_group(spec: "ModelSpec", host: str, options: dict[str, Any]) -> tuple["Rank", list[Any]]:
    """Start ranks 1, 2, … of the calling replica's model. Returns rank 0 and the actors, which end when released.

    Args:
        host: this node's address for the other ranks.
        options: each actor's CPUs, GPUs, resources and environment.
    """
    from engine.loading.tensor_parallel import Rank

    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    device = "cuda:0" if options.get("num_gpus") else "cpu"  # the index among the GPUs that Ray gives the actor
    group = get_current_placement_group()
    assert group is not None
    actors = []
    for rank in range(1, spec.tensor_parallel):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor: Any = ray.remote(RankActor).options(scheduling_strategy=strategy, **options).remote()
        actor.follow.remote(spec, Rank(rank, spec.tensor_parallel, host, port, device))
        actors.append(actor)
    return Rank(0, spec.tensor_parallel, host, port, device), actors
