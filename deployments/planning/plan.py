"""Which devices, threads, memory and lengths models get."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import locate, naming
from deployments.configuration.roles import REPLICA_KEYS
from deployments.planning.devices import CPU, Demand, DeviceShare, Machine, share_gpus
from deployments.planning.hub import Snapshot
from deployments.planning.model_size import ModelSize, size_of
from engine.loading.host import AUTO_SLOTS, CPU_SHARE, PREFILL_CHUNK, USABLE

GIB = 2**30
_FEW_CORES = 8  # with fewer, a drafter alternates with its target instead of taking cores from it
_HTTP_CORES = 1  # kept for the coordinator where there are more
_TARGET_WEIGHT = 3  # cores of a target for every core of a drafter
_HOST_SHARE = 0.5  # of free memory for the KV caches of all models on the CPU together
_MARGIN = 0.8  # of the length that fits by these estimates
_SHORTEST = 128  # tokens of a request; less room is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a model gets. None: what its replica chooses itself."""

    name: str
    drafts_for: str | None
    gpus: tuple[int, ...]  # of all its processes, in nvidia-smi's numbers; (): on the CPU
    max_length: int | None
    size: ModelSize | None  # on each device; None: unknown
    colocated_with: str | None = None
    num_gpus: float | None = None  # of each process; None: of the model that it is colocated with
    num_cpus: float = 0
    threads: int | None = None
    memory_bytes: int | None = None
    kv_tokens: int | None = None  # about, in each replica


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignments by model, and what is worth knowing about them."""

    models: Mapping[str, Assignment]
    gpus: tuple[int, ...]  # in the order in which Ray should give them away; () if none is used
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Replica:
    """A model, the drafters colocated with it, and the device of each of its processes."""

    demand: Demand
    colocated: Sequence[Demand]
    device: DeviceShare

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, on each device."""
        return sum(each.weights_bytes for each in (self.demand, *self.colocated))

    @property
    def token_bytes(self) -> int | None:
        """Bytes of a token's keys and values in all models; None if unknown."""
        sizes = [each.kv_bytes for each in (self.demand, *self.colocated)]
        known = [size for size in sizes if size is not None]
        return sum(known) or None if len(known) == len(sizes) else None


def make_plan(machine: Machine, demands: Sequence[Demand]) -> Plan:
    """Give every model its device, threads, memory and length; raises ConfigError if one does not fit.

    A target and its drafter get GPUs of their own, or share one by colocation. What is left runs on the CPU. Models
    that answer come before those that only draft.
    """
    notes = [] if machine.unusable_gpus is None else [machine.unusable_gpus]
    demands = _colocate(machine, demands)
    own = [demand for demand in demands if demand.colocated_with is None]
    devices = share_gpus(machine, own)
    for demand in own:
        if demand.needs_gpu and devices[demand.name] == CPU:
            raise ConfigError(f"models.{demand.name}.device: needs a GPU, and there is none for it; set it to cpu")
    on_cpu = [demand for demand in own if devices[demand.name] == CPU]
    threads = _share_cores(machine.cores, on_cpu)
    host_share, host_room = _host_share(machine, on_cpu, demands)
    models: dict[str, Assignment] = {}
    for demand in own:
        colocated = [other for other in demands if other.colocated_with == demand.name]
        device = devices[demand.name]
        replica = _Replica(demand, colocated, device)
        _check_fits(replica, machine)
        memory, room = _room(replica, host_share, host_room)
        length = _fitting_length(replica, room, notes)
        models[demand.name] = Assignment(
            name=demand.name,
            drafts_for=demand.drafts_for,
            gpus=device.gpus,
            num_gpus=device.num_gpus,
            num_cpus=demand.num_cpus or (threads.get(demand.name, 1) if demand.tensor_parallel > 1 else 0),
            threads=demand.threads or threads.get(demand.name),
            memory_bytes=memory,
            max_length=length,
            size=demand.share,
            kv_tokens=_tokens(replica, demand.longest if length is None else length, room),
        )
        for drafter in colocated:
            models[drafter.name] = Assignment(
                name=drafter.name,
                drafts_for=drafter.drafts_for or demand.name,
                colocated_with=demand.name,
                gpus=device.gpus,
                max_length=drafter.max_length,
                size=drafter.share,
            )
    models = {demand.name: _shorten_drafter(demand, models) for demand in demands}
    used = tuple(dict.fromkeys(gpu for demand in own for gpu in devices[demand.name].gpus))
    idle = [gpu.index for gpu in machine.gpus if gpu.index not in used]
    if idle:
        notes.append(f"idle: GPU {', '.join(map(str, idle))}; more `replicas` would use them")
    forgotten = [demand.name for demand in on_cpu if demand.num_gpus is None]
    if machine.gpus and forgotten:
        notes.append(f"on the CPU, since no GPU is left: {', '.join(forgotten)}")
    return Plan(models, (*used, *idle) if used else (), tuple(notes))


def _colocate(machine: Machine, demands: Sequence[Demand]) -> list[Demand]:
    """Put drafters that may be colocated into their targets' replicas, where they would compete for a device."""
    targets = {demand.name: demand for demand in demands}
    spare = len(machine.gpus) - sum(demand.processes for demand in demands if not demand.may_colocate)

    def colocated(demand: Demand) -> Demand:
        target = targets.get(demand.drafts_for or "")
        if not demand.may_colocate or target is None or target.tensor_parallel > 1:
            return demand
        few = spare < demand.processes if machine.gpus and target.num_gpus != 0 else machine.cores < _FEW_CORES
        return replace(demand, colocated_with=target.name) if few else demand

    return [colocated(demand) for demand in demands]


def _check_fits(replica: _Replica, machine: Machine) -> None:
    if replica.device.free_bytes is None:
        return
    demand, room, needed = replica.demand, int(replica.device.free_bytes * USABLE), replica.weights_bytes
    if needed <= room:
        return
    parts = 2 * demand.parts
    while needed * demand.parts > room * parts and parts <= len(machine.gpus):
        parts *= 2
    key = "num_gpus" if demand.devices > 1 else "tensor_parallel"
    split = f", {key}: {parts}" if parts <= len(machine.gpus) else ""
    raise ConfigError(
        f"models.{demand.name}: the weights need {needed / GIB:.2f} GiB, and "
        f"{'a share of a GPU' if replica.device.shared else 'the GPU'} has room for {room / GIB:.2f} GiB; take a "
        f"smaller model, quantization: int4{split}, or num_gpus: 0 for the CPU"
    )


def _share_cores(cores: int, on_cpu: Sequence[Demand]) -> dict[str, int]:
    """Return the threads of each process on the CPU whose number nobody has set."""
    unset = [demand for demand in on_cpu if demand.threads is None and not demand.num_cpus]
    fixed = sum(int(demand.threads or demand.num_cpus) * demand.processes for demand in on_cpu if demand not in unset)
    room = max(cores - fixed - (_HTTP_CORES if cores >= _FEW_CORES else 0), 1)
    weights = {demand.name: 1 if demand.drafts_for else _TARGET_WEIGHT for demand in unset}
    total = sum(weights[demand.name] * demand.processes for demand in unset)
    return {name: max(room * weight // total, 1) for name, weight in weights.items()}


def _host_share(machine: Machine, on_cpu: Sequence[Demand], demands: Sequence[Demand]) -> tuple[float, int]:
    """Return the share of the memory free after loading that each CPU process has for its KV cache, and the bytes."""
    names = {demand.name for demand in on_cpu}
    loaded = [demand for demand in demands if demand.name in names or demand.colocated_with in names]
    needed = sum(demand.weights_bytes * demand.processes for demand in loaded)
    if needed > machine.free_bytes * USABLE:
        raise ConfigError(
            f"models.{max(loaded, key=lambda demand: demand.weights_bytes).name}: the weights of all models on the CPU "
            f"need {needed / GIB:.2f} GiB, and there is room for {machine.free_bytes * USABLE / GIB:.2f} GiB; take a "
            "smaller model, dtype: bfloat16 or quantization: int4"
        )
    share = min(CPU_SHARE, _HOST_SHARE / max(sum(demand.processes for demand in on_cpu), 1))
    return share, int((machine.free_bytes - needed) * share)


def _room(replica: _Replica, host_share: float, host_room: int) -> tuple[int | None, int]:
    """Return `memory_bytes` and the bytes for keys and values, on each device."""
    demand, device, weights = replica.demand, replica.device, replica.weights_bytes
    if demand.memory_bytes is not None:
        return demand.memory_bytes, max(demand.memory_bytes - weights, 0)
    if device.free_bytes is not None:
        usable = int(device.free_bytes * USABLE)
        return usable if device.shared else None, max(usable - weights, 0)
    return None if host_share == CPU_SHARE or demand.size is None else weights + host_room, host_room


def _fitting_length(replica: _Replica, room: int, notes: list[str]) -> int | None:
    """Return `max_length`: as configured, None for the model's own, or less where memory is short."""
    demand, token_bytes, longest = replica.demand, replica.token_bytes, replica.demand.longest
    if demand.max_length is not None or token_bytes is None or longest is None:
        return demand.max_length
    fitting = room // token_bytes - PREFILL_CHUNK
    if fitting >= longest:
        return None
    length = int(fitting * _MARGIN) // 16 * 16
    if length < _SHORTEST:
        raise ConfigError(
            f"models.{demand.name}: beside the weights there is room for {room / GIB:.2f} GiB of keys and values, "
            f"{max(room // token_bytes, 0)} tokens; take a smaller model or quantization: int4, or free memory"
        )
    notes.append(f"{demand.name}: requests of up to {length:,} tokens instead of {longest:,}, since memory is short")
    return length


def _tokens(replica: _Replica, longest: int | None, room: int) -> int | None:
    """Return about how many tokens the KV cache will hold: what fits, but no more than all slots can use."""
    if replica.token_bytes is None:
        return None
    slots, fitting = replica.demand.slots, room // replica.token_bytes
    if slots == "auto":
        slots = AUTO_SLOTS["cuda" if replica.device.gpus else "cpu"]
    return fitting if longest is None else min(fitting, slots * (longest + PREFILL_CHUNK))


def _shorten_drafter(demand: Demand, models: Mapping[str, Assignment]) -> Assignment:
    """Return a drafter's assignment with no longer texts than its target's, where both were planned."""
    own, target = models[demand.name], models.get(demand.drafts_for or "")
    if demand.max_length is not None or target is None or target.max_length is None or not demand.may_colocate:
        return own
    longest = own.max_length or demand.longest
    return replace(own, max_length=target.max_length if longest is None else min(longest, target.max_length))


def plan_server(
    config: ServerConfig,
    machine: Machine,
    *,
    snapshots: Mapping[str, Snapshot] = MappingProxyType({}),
    may_colocate: Collection[str] = (),
) -> Plan:
    """Plan for this machine what a configuration leaves open; raises ConfigError if a model is damaged or too large.

    snapshots: models of the Hub, by name.
    may_colocate: drafters that the planner may put into their targets' replicas.
    """

    def sized(demand: Demand) -> Demand:
        model, snapshot = config.models[demand.name], snapshots.get(demand.name)
        path = locate(model.path) if snapshot is None else str(snapshot.folder)
        with naming(f"models.{demand.name}.path"):
            size = size_of(model, path, weights_bytes=None if snapshot is None else snapshot.weights_bytes)
        return replace(demand, size=size)

    return make_plan(machine, [sized(demand) for demand in demands_of(config, may_colocate)])


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
            caches=2 if roles.get(name) == "both" else 1,
            tensor_parallel=model.tensor_parallel,
            devices=max(int(model.num_gpus or 1), 1) if model.device == "balanced" else 1,
            replicas=model.replicas,
        )

    return sorted(map(demand, config.models), key=lambda each: each.drafts_for is not None)


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
    decided = {key: getattr(assignment, key) for key in ("num_gpus", "num_cpus", "threads", "max_length")}
    if assignment.memory_bytes is not None:
        decided["memory_gib"] = round(assignment.memory_bytes / GIB, 3)
    return model.model_copy(update={key: value for key, value in decided.items() if getattr(model, key) != value})
