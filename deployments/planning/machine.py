"""What this machine has: GPUs, cores and free memory. Imports no torch, which takes seconds."""

import importlib.metadata
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.loading.host import free_host_bytes

_MIB = 2**20
_STANDBY_CORES, _STANDBY_BYTES = 2, 4 * 2**30  # it takes half a GiB, and next to no time
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
_QUERY_TIMEOUT_S = 20
_DEVICES, _GPU_FILES = Path("/dev"), ("nvidia*", "kfd", "dxg")  # of NVIDIA's driver, AMD's, and WSL's
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
