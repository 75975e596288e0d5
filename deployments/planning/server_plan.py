"""Plans for whole configurations: what their models demand, and the configuration that a plan gives."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig
from deployments.configuration.model import ModelConfig, locate
from deployments.configuration.roles import REPLICA_KEYS
from deployments.planning.demand import Demand, ModelSize
from deployments.planning.hub import Snapshot
from deployments.planning.machine import Machine
from deployments.planning.model_size import size_of
from deployments.planning.plan import GIB, Assignment, Plan, make_plan
from engine.loading.gguf import is_gguf


def plan_server(
    config: ServerConfig,
    machine: Machine,
    *,
    snapshots: Mapping[str, Snapshot] | None = None,
    may_colocate: Collection[str] = (),
) -> Plan:
    """Plan for this machine what a configuration leaves open.

    Args:
        snapshots: models of the Hub, by name.
        may_colocate: drafters that the planner may put into their targets' replicas.

    Raises:
        ConfigError: a model does not fit, or a checkpoint is damaged or not whole.
    """
    demands = [
        replace(demand, size=_size(demand.name, config.models[demand.name], (snapshots or {}).get(demand.name)))
        for demand in demands_of(config, may_colocate)
    ]
    return make_plan(machine, demands)


def demands_of(config: ServerConfig, may_colocate: Collection[str] = ()) -> list[Demand]:
    """Return what the models of a configuration demand, those that answer first. Their sizes are not known here."""
    roles = config.roles()
    targets = {endpoint.drafter: endpoint.target for endpoint in reversed(config.endpoints.values())}

    def demand(name: str) -> Demand:
        model = config.models[name]
        drafts = roles.get(name, "drafter") == "drafter"
        return Demand(
            name=name,
            drafts_for=targets.get(name) if drafts else None,
            may_colocate=name in may_colocate,
            colocated_with=model.colocated_with,
            needs_gpu=model.device.startswith(("cuda", "balanced")),
            num_gpus=0 if model.device == "cpu" and model.num_gpus is None else model.num_gpus,
            num_cpus=model.num_cpus,
            threads=model.threads,
            memory_bytes=None if model.memory_gib is None else int(model.memory_gib * GIB),
            max_length=model.max_length,
            slots=model.slots,
            prefill_chunk=model.prefill_chunk,
            caches=2 if roles.get(name) == "both" else 1,
            tensor_parallel=model.tensor_parallel,
            devices=max(int(model.num_gpus or 1), 1) if model.device == "balanced" else 1,
            replicas=model.replicas,
        )

    demands = [demand(name) for name in config.models]
    return sorted(demands, key=lambda each: each.drafts_for is not None)


def planned(config: ServerConfig, plan: Plan) -> ServerConfig:
    """Return the configuration with what the plan decides; what was configured stays."""
    models = {name: _with(model, plan.models[name]) for name, model in config.models.items()}
    return config.model_copy(update={"models": models})


def give_cluster_gpus(config: ServerConfig, gpus: float) -> ServerConfig:
    """Return the configuration for a cluster: where it has GPUs, models get one each unless `num_gpus` says otherwise.

    Those that answer, or need a GPU, wait for it; those that only draft get what is left, or draft on CPUs.
    """
    models = dict(config.models)
    left = gpus - sum((model.num_gpus or 0) * model.processes for model in models.values())
    for demand in demands_of(config):
        model = models[demand.name]
        if model.num_gpus is not None or model.colocated_with is not None:
            continue
        may_wait = demand.needs_gpu or (gpus > 0 and demand.drafts_for is None)
        takes = demand.num_gpus is None and (may_wait or left >= demand.processes)
        left -= demand.processes if takes else 0
        tied = not takes and model.tensor_parallel > 1 and not (model.num_cpus or model.resources)
        models[demand.name] = model.model_copy(update={"num_gpus": float(takes)} | ({"num_cpus": 1.0} if tied else {}))
    return config.model_copy(update={"models": models})


def _with(model: ModelConfig, assignment: Assignment) -> ModelConfig:
    if assignment.colocated_with is not None:
        own = model.model_dump(exclude_unset=True, exclude=REPLICA_KEYS | {"colocated_with", "max_length"})
        return ModelConfig(**own, colocated_with=assignment.colocated_with, max_length=assignment.max_length)
    memory_gib = None if assignment.memory_bytes is None else round(assignment.memory_bytes / GIB, 3)
    decided = {
        "num_gpus": assignment.num_gpus,
        "num_cpus": assignment.num_cpus,
        "threads": assignment.threads,
        "memory_gib": memory_gib,
        "max_length": assignment.max_length,
    }
    return model.model_copy(update={key: value for key, value in decided.items() if getattr(model, key) != value})


def _size(name: str, model: ModelConfig, snapshot: Snapshot | None) -> ModelSize | None:
    path = locate(model.path) if snapshot is None else str(snapshot.folder)
    folder = Path(path)
    if not is_gguf(path) and folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"models.{name}.path: {model.path!r} has no config.json; a model's folder has one, with its tokenizer and "
            "its *.safetensors"
        )
    return size_of(model, path, weights_bytes=None if snapshot is None else snapshot.weights_bytes)
