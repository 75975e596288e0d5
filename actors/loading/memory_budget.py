"""Memory for a model and its KV slots: how much is free, how many slots fit. Knows nothing of requests."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from actors.model.kv_pages import KVPages
from decoding.errors import ConfigError

AUTO_SLOTS = 64  # the most that "auto" gives: larger batches run without CUDA graphs
GIB = 2**30
_USABLE = 0.9  # share of free memory; the rest is for activations, CUDA graphs and other processes
_CGROUP = Path("/sys/fs/cgroup")

Bytes = Mapping[torch.device, int]


def free_bytes(device: torch.device) -> int:
    """Return how much a process can still allocate on a device. On the CPU, the container's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(available, _container_room())


def _container_room() -> int:
    """Return the bytes left in the control group (version 2). File pages that can be dropped count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # no container, or another version
        return 2**63
    return 2**63 if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))


def weights_on_devices(model: nn.Module) -> dict[torch.device, int]:
    """Return the bytes of parameters and buffers. Call it before `pack_linears`, which hides them."""
    used: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        used[tensor.device] = used.get(tensor.device, 0) + tensor.nbytes
    return used


def column_bytes(cache: KVPages, dtype: torch.dtype | None = None) -> dict[torch.device, int]:
    """Return the bytes of one token's keys and values in all layers, on each device.

    cache: any number of slots, after a first call. dtype: of the slots to allocate; None: as in `cache`.
    """
    used: dict[torch.device, int] = {}
    for store in (store for stores in cache.layers.values() for store in stores):
        numbers = store[0].numel() // cache.page_size
        used[store.device] = used.get(store.device, 0) + numbers * (dtype or store.dtype).itemsize
    return used


def check_weights(name: str, needed: int, smaller: Mapping[str, int], *, room: int) -> None:
    """Refuse a model that is too large, before it is loaded.

    needed: bytes of its weights. smaller: bytes with other settings, by the setting in words. room: bytes.

    Raises:
        ConfigError: the weights don't fit; the message names a setting or a size of model that would.
    """
    if needed <= room:
        return
    fitting = [f"{setting} would need {_in_words(size)}" for setting, size in smaller.items() if size <= room]
    advice = " or ".join(fitting) or f"a model of {room / needed:.0%} of its size would fit"
    raise ConfigError(
        f"models.{name}: the weights need {_in_words(needed)}, but there is room for {_in_words(room)}: {advice}"
    )


def fit_slots(name: str, wanted: int | Literal["auto"], *, slot_bytes: Bytes, room: Bytes, capacity: int) -> int:
    """Return how many slots to allocate, not counting the slot for padding.

    wanted: "auto" means as many as fit, up to AUTO_SLOTS. slot_bytes: bytes of one slot of `capacity` columns.

    Raises:
        ConfigError: they don't fit; the message says how many slots or columns would.
    """
    fitting = min(room[device] // size for device, size in slot_bytes.items()) - 1
    needed, free = sum(slot_bytes.values()), sum(room[device] for device in slot_bytes)
    if fitting < 1:
        columns = capacity * min(room[device] / (2 * size) for device, size in slot_bytes.items())
        raise ConfigError(
            f"models.{name}.max_length: two KV slots of {capacity} columns (max_length and prefill_chunk together) "
            f"need {_in_words(2 * needed)}, but the weights leave {_in_words(free)}; {int(columns)} columns would fit"
        )
    if wanted == "auto":
        return min(fitting, AUTO_SLOTS)
    if wanted > fitting:
        raise ConfigError(
            f"models.{name}.slots is {wanted}: so many KV slots and one for padding need "
            f"{_in_words((wanted + 1) * needed)}, but the weights leave {_in_words(free)}; {fitting} would fit"
        )
    return wanted


def room_for_slots(devices: Iterable[torch.device], used: Bytes, limit: int | None) -> dict[torch.device, int]:
    """Return the bytes for KV slots after loading. used: bytes of the weights. limit: for both, per device."""
    return {device: _within(free_bytes(device), used.get(device, 0), limit) for device in devices}


def room_for_weights(devices: Iterable[torch.device], limit: int | None) -> int:
    """Return the bytes for weights before loading, on all devices together. limit: per device."""
    return sum(_within(free_bytes(device), 0, limit) for device in devices)


def _within(free: int, used: int, limit: int | None) -> int:
    usable = int(free * _USABLE)
    return usable if limit is None else max(min(usable, limit - used), 0)


def _in_words(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
