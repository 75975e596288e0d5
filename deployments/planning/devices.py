"""What this machine has, what models demand, and which of them gets which GPUs. Imports no torch."""

import importlib.metadata
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from decoding.errors import ConfigError
from deployments.configuration.model import MAX_LENGTH
from deployments.planning.model_size import ModelSize
from engine.loading.host import USABLE, free_host_bytes

_MIB = 2**20
_STANDBY_CORES, _STANDBY_BYTES = 2, 4 * 2**30  # it takes half a GiB, and next to no time
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
_QUERY_TIMEOUT_S = 20
_DEVICES, _GPU_FILES = Path("/dev"), ("nvidia*", "kfd", "dxg")  # of NVIDIA's driver, AMD's, and WSL's
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_GPU_STEPS = 10_000  # Ray counts fractions of a GPU in these


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that processes of this user may use."""

    index: int  # as nvidia-smi counts
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and memory that are free."""

    gpus: tuple[Gpu, ...]
    cores: int
    free_bytes: int  # of the host's memory
    unusable_gpus: str | None = None  # why GPUs that are there can't be used
    uncounted_gpus: bool = False  # whether there may be GPUs that nvidia-smi does not tell


def this_machine() -> Machine:
    """Return what this process may use. CUDA_VISIBLE_DEVICES and a container's limits count."""
    gpus, cores, free_bytes = _visible_gpus(), _cores(), free_host_bytes()
    if gpus and importlib.metadata.version("torch").endswith("+cpu"):
        idle = f"{len(gpus)} GPU(s) stay idle: the installed torch computes on CPUs only; install one for CUDA"
        return Machine((), cores, free_bytes, unusable_gpus=idle)
    uncounted = not gpus and any(path for name in _GPU_FILES for path in _DEVICES.glob(name))
    return Machine(gpus, cores, free_bytes, uncounted_gpus=uncounted)


def has_room_for_standby() -> bool:
    """Whether a second coordinator takes little of what is free: memory now, and cores altogether."""
    return _cores() >= _STANDBY_CORES and free_host_bytes() >= _STANDBY_BYTES


def prefer_gpus(gpus: Sequence[int]) -> None:
    """Let a Ray that starts later give GPUs away in this order. gpus: nvidia-smi's numbers; (): leave it to Ray."""
    if gpus:
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def _visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all if it is not set."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus: list[tuple[str, Gpu]] = []
    for line in answer.splitlines():
        index, uuid, *sizes = (part.strip() for part in line.split(","))
        if len(sizes) == 2 and all(size.isdigit() for size in sizes):  # some GPUs share the host's memory: "[N/A]"
            total, free = (int(size) * _MIB for size in sizes)
            gpus.append((uuid, Gpu(int(index), total, free)))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(gpu for _, gpu in gpus)
    return tuple(
        gpu
        for name in map(str.strip, names.split(","))
        for uuid, gpu in gpus
        if name == str(gpu.index) or (name.startswith("GPU-") and uuid.startswith(name))
    )


def _cores() -> int:
    """Return the CPUs that this process may run on, or a container's share of them."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A model to serve. None: to be planned."""

    name: str
    size: ModelSize | None = None  # None: unknown
    drafts_for: str | None = None  # the target of a model that only drafts
    may_colocate: bool = False  # whether the planner may put a drafter into its target's replicas
    colocated_with: str | None = None
    needs_gpu: bool = False
    num_gpus: float | None = None
    num_cpus: float = 0
    threads: int | None = None
    memory_bytes: int | None = None  # for weights and KV cache, on each device
    max_length: int | None = None
    slots: int | Literal["auto"] = "auto"
    caches: int = 1
    tensor_parallel: int = 1
    devices: int = 1  # of each process, over which its layers are spread
    replicas: int = 1

    @property
    def processes(self) -> int:
        return self.replicas * self.tensor_parallel

    @property
    def parts(self) -> int:
        """Devices that share the weights of a replica."""
        return self.tensor_parallel * self.devices

    @property
    def share(self) -> ModelSize | None:
        """Size of the part on each device."""
        size, parts = self.size, self.parts
        if size is None:
            return None
        step, kv = (None if number is None else number // parts for number in (size.step_bytes, size.kv_bytes))
        return replace(size, weights_bytes=size.weights_bytes // parts, step_bytes=step, kv_bytes=kv)

    @property
    def weights_bytes(self) -> int:
        """Bytes on each device; 0 if unknown."""
        return 0 if self.share is None else self.share.weights_bytes

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of a token on each device."""
        size = self.size
        return None if size is None or size.kv_bytes is None else size.kv_bytes * self.caches // self.parts

    @property
    def longest(self) -> int | None:
        """Tokens of a request, as configured or as the model has positions."""
        positions = None if self.size is None else self.size.positions
        return self.max_length if positions is None or self.max_length is not None else min(positions, MAX_LENGTH)


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A process's share of a device."""

    gpus: tuple[int, ...]  # of all processes of the model
    num_gpus: float
    free_bytes: int | None  # of the smallest of its GPUs, or its share of one; None: on the CPU
    shared: bool = False


CPU = DeviceShare((), 0, None)


def share_gpus(machine: Machine, own: Sequence[Demand]) -> dict[str, DeviceShare]:
    """Give GPUs to the models that were told how many, to those that answer, and then to those that draft."""
    left = sorted(machine.gpus, key=lambda gpu: -gpu.free_bytes)
    rests: dict[Gpu, float] = {}  # what is left of GPUs that were given away in part
    devices = dict.fromkeys((demand.name for demand in own), CPU)
    for demand in own:
        if demand.num_gpus:
            devices[demand.name] = _requested(demand, demand.num_gpus, left, rests)
    unset = [demand for demand in own if demand.num_gpus is None]
    answering = [demand for demand in unset if demand.drafts_for is None]
    wanted = sum(demand.processes for demand in answering)
    if left and wanted > len(left):
        devices |= _share_each(answering, left)
        left.clear()
        answering = []
    for demand in [*answering, *(demand for demand in unset if demand.drafts_for is not None)]:
        if demand.processes <= len(left):
            taken, left[:] = left[: demand.processes], left[demand.processes :]
            devices[demand.name] = _share(taken, 1)
        elif demand.processes == 1 and demand.size is not None:
            roomy = [rest for gpu, rest in rests.items() if demand.weights_bytes <= rest * gpu.free_bytes * USABLE]
            if rest := max(roomy, default=0):
                devices[demand.name] = _requested(demand, rest, left, rests)
    return devices


def _requested(demand: Demand, amount: float, left: list[Gpu], rests: dict[Gpu, float]) -> DeviceShare:
    """Take an amount for each process, parts from GPUs that were given away in part before whole ones."""
    if amount >= 1:
        count = min(int(amount * demand.processes), len(left))
        taken, left[:] = left[:count], left[count:]
        return _share(taken, amount)
    taken = []
    for _ in range(demand.processes):
        if left and all(rest < amount for rest in rests.values()):
            rests[left.pop(0)] = 1
        gpu = next((gpu for gpu, rest in rests.items() if rest >= amount), None)
        if gpu is not None:
            rests[gpu] = round((rests[gpu] - amount) * _GPU_STEPS) / _GPU_STEPS
            taken.append(gpu)
    return _share(list(dict.fromkeys(taken)), amount)


def _share_each(answering: Sequence[Demand], left: Sequence[Gpu]) -> dict[str, DeviceShare]:
    wanted = sum(demand.processes for demand in answering)
    for demand in answering:
        if demand.tensor_parallel > 1:
            raise ConfigError(
                f"models.{demand.name}.tensor_parallel: all replicas need {wanted} GPUs together, and {len(left)} are "
                "free; lower it, or the number of replicas"
            )
    sharers = -(-wanted // len(left))
    return dict.fromkeys((demand.name for demand in answering), _share(left, _GPU_STEPS // sharers / _GPU_STEPS))


def _share(gpus: Sequence[Gpu], num_gpus: float) -> DeviceShare:
    free_bytes = int(min(gpu.free_bytes for gpu in gpus) * min(num_gpus, 1)) if gpus else None
    return DeviceShare(tuple(gpu.index for gpu in gpus), num_gpus, free_bytes, shared=num_gpus < 1)
