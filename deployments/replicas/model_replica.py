"""A replica of a model, and the other ranks of a tensor-parallel one. Their processes alone import torch."""

import gc
import os
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.loops.thread import return_idle_memory
from decoding.drafts.options import CorpusOptions
from decoding.errors import UnavailableError
from deployments.configuration.model import ModelConfig
from deployments.configuration.roles import Role
from deployments.replicas.environment import actor_options, share_interpreter, uncollected
from deployments.replicas.stages import publish_failure, published_stages
from deployments.scaling.policy import Felt
from engine.heads.spec import HeadsSpec
from engine.loading.host import stages
from engine.loading.lean_imports import lean_imports

if TYPE_CHECKING:
    from actors.wire.messages import ReplicaAddress, Report
    from deployments.endpoints.adapters import AdapterChange
    from engine.loading.checkpoint import ModelSpec
    from engine.loading.tensor_parallel import Rank

    Adapters = Mapping[str, AdapterChange]

_DRAIN_S = 25.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's process and load, for operators."""

    name: str
    pid: int
    report: "Report"


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """What a replica tells a coordinator. coordinators: those that ask it, this one included."""

    address: "ReplicaAddress"
    coordinators: int


class ModelReplica:
    """A replica of a model: loads it and runs its loop."""

    @published_stages()
    def __init__(
        self,
        name: str,
        role: Role,
        config: ModelConfig,
        targets: dict[str, ModelConfig],
        colocated_drafter: dict[str, ModelConfig],
        leaders: dict[str, ModelConfig],
        heads: HeadsSpec | None = None,
        corpus: CorpusOptions | None = None,
    ) -> None:
        """
        targets: for a drafter, the models it drafts for, by name.
        colocated_drafter: the drafter that runs in a target's replicas, by name; empty if there is none.
        leaders: for a member with its own vocabulary, the leaders of its ensembles, by name.
        heads: on a target's hidden states; None: it has none.
        corpus: of a target; None: it keeps none.
        """
        stages.info("importing torch")
        lean = nullcontext if config.num_gpus or config.tensor_parallel > 1 else lean_imports
        with uncollected(), lean():
            from actors.replica.replica import Replica, ReplicaSpec
            from deployments.endpoints.adapters import AdapterRegistry
            from deployments.monitoring.replica_metrics import LoadMeter, ReplicaMetrics

        share_interpreter()
        self._meter = LoadMeter()
        host, spec, rank = ray.util.get_node_ip_address(), config.spec(name), None
        if spec.tensor_parallel > 1:
            rank, self._ranks = start_group(spec, host, actor_options(config))
        replica = ReplicaSpec(
            role=role,
            model=spec,
            targets=[target.spec(target_name) for target_name, target in targets.items()],
            leaders=[leader.spec(leader_name) for leader_name, leader in leaders.items()],
            colocated=next((drafter.spec(own_name) for own_name, drafter in colocated_drafter.items()), None),
            heads=heads,
            corpus=corpus,
            rank=rank,
            weights_at_run_time=config.weights_at_run_time,
            adaptation=None if config.adaptation is None else config.adaptation.options(),
        )
        with lean():
            self._replica = Replica(replica, host)
        gc.collect()
        gc.freeze()  # permanent objects, a model's modules above all: collecting them again would delay a step
        return_idle_memory()  # loading leaves 100 MB of it
        self._metrics = ReplicaMetrics(name, role)
        self._adapters = AdapterRegistry()

    def address(self, coordinator: str | None = None, queued: int = 0, felt: Felt = Felt()) -> ReplicaAnswer:
        """Return the address for coordinators; raises UnavailableError while the loop is stuck.

        queued: requests that the calling coordinator holds back because the model has no free slot.
        felt: how its other requests fared.
        """
        if coordinator is not None:
            self._meter.note_coordinator(coordinator, queued, felt)
        self._replica.check()
        return ReplicaAnswer(self._replica.address, self._meter.count_coordinators())

    def merge_adapters(self, changes: "Adapters") -> "Adapters":
        """Remember for coordinators that start later which adapters were loaded at run time. Returns all changes."""
        self._adapters.merge(changes)
        return self._adapters.changes

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self._replica.address.name, os.getpid(), self._replica.report())

    def record_autoscaling_stats(self) -> dict[str, float]:
        return asdict(self._meter.measure(self._replica.report(), self._replica.times))

    def check_health(self) -> None:
        """Serve's health check; raises UnavailableError if the loop has ended or is stuck."""
        replica = self._replica
        try:
            replica.check()
        except UnavailableError as error:
            publish_failure(str(error))
            raise
        self._metrics.export(replica.report(), replica.times, replica.malformed)  # Serve calls every two seconds

    def __del__(self) -> None:
        """Hand running requests over before the replica ends. Serve calls this."""
        replica = self.__dict__.pop("_replica", None)  # missing if the constructor failed
        if replica is not None:
            replica.drain(_DRAIN_S)


class RankActor:
    """A rank other than 0."""

    def follow(self, spec: "ModelSpec", rank: "Rank") -> None:
        """Run the same forwards as rank 0 until it stops."""
        from engine.loading.tensor_parallel import follow_in_group

        follow_in_group(spec, rank)


def start_group(spec: "ModelSpec", host: str, options: dict[str, Any]) -> tuple["Rank", list[Any]]:
    """Start ranks 1, 2, … of the calling replica's model. Returns rank 0 and the actors, which end when released.

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
