"""The other ranks of a model that is spread over several devices: Ray actors beside the replica, which is rank 0.

They live in the replica's placement group, one in each further bundle, and end with it.
"""

import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from actors.loading.checkpoint import ModelSpec
    from actors.loading.tensor_parallel import Rank


class Follower:
    """One rank."""

    def follow(self, spec: "ModelSpec", rank: "Rank") -> None:
        """Do what rank 0 does until it stops."""
        from actors.loading.tensor_parallel import follow_in_group

        follow_in_group(spec, rank)


def start_group(spec: "ModelSpec", host: str, options: dict[str, Any]) -> tuple["Rank", list[Any]]:
    """Start ranks 1, 2, … of the calling replica's model. Returns its own place, and them, who end when let go.

    Args:
        host: this node's address, as the others know it.
        options: of each rank's Ray actor: its CPUs, GPUs, resources and environment.
    """
    from actors.loading.tensor_parallel import Rank

    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    device = "cuda:0" if options.get("num_gpus") else "cpu"  # of those that Ray lets the actor see
    group = get_current_placement_group()
    assert group is not None
    attached_drafters = []
    for rank in range(1, spec.tensor_parallel):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        attached_drafter: Any = ray.remote(Follower).options(scheduling_strategy=strategy, **options).remote()
        attached_drafter.follow.remote(spec, Rank(rank, spec.tensor_parallel, host, port, device))
        attached_drafters.append(attached_drafter)
    return Rank(0, spec.tensor_parallel, host, port, device), attached_drafters
