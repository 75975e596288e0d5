"""Memory for models and their KV caches: how much is free, how many pages fit."""

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from decoding.sampling.penalties import TOKEN_BYTES
from engine.loading.host import AUTO_SLOTS, CPU_SHARE, USABLE, free_host_bytes
from engine.model.kv_pages import KVPages
from engine.model.page_allocator import PAGE_SIZE

GIB = 2**30

Bytes = Mapping[torch.device, int]


def free_bytes(device: torch.device) -> int:
    """Return how much a process can still allocate on a device. On the CPU, the container's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def weights_on_devices(model: nn.Module) -> dict[torch.device, int]:
    """Return the bytes of parameters and buffers. Call it before `pack_linears`, which hides them."""
    used: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        used[tensor.device] = used.get(tensor.device, 0) + tensor.nbytes
    return used


def tied_output_bytes(model: PreTrainedModel) -> dict[torch.device, int]:
    """Return the bytes of an output layer on a CPU whose weight is the embedding's, too. Packed, it is a copy."""
    weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None or weight.device.type != "cpu":
        return {}
    uses = sum(parameter is weight for _, parameter in model.named_parameters(remove_duplicate=False))
    return {weight.device: weight.nbytes} if uses > 1 else {}


def column_bytes(cache: KVPages, dtype: torch.dtype | None = None) -> dict[torch.device, int]:
    """Return the bytes of one token's keys and values in all layers, and in the table of penalties, on each device.

    cache: of any size, after a first call. dtype: of the pages to allocate; None: as in `cache`.
    """
    used: dict[torch.device, int] = {}
    for store in (store for stores in cache.layers.values() for store in stores):
        numbers = store[0].numel() // cache.page_size
        used[store.device] = used.get(store.device, 0) + numbers * (dtype or store.dtype).itemsize
    last = next(reversed(used)) if used else cache.last_device  # where logits are, too
    used[last] = used.get(last, 0) + TOKEN_BYTES
    return used


def check_weights(name: str, needed: int, smaller: Mapping[str, int], *, room: int) -> None:
    """Refuse a model that is too large, before it is loaded.

    needed: bytes of its weights. smaller: bytes with other settings, by the setting in words. room: bytes.

    Raises ConfigError if the weights don't fit; the message names a setting or a size of model that would.
    """
    if needed <= room:
        return
    fitting = [f"{setting} would need {_in_words(size)}" for setting, size in smaller.items() if size <= room]
    advice = " or ".join(fitting) or f"a model of {room / needed:.0%} of its size would fit"
    raise ConfigError(
        f"models.{name}: the weights need {_in_words(needed)}, but there is room for {_in_words(room)}: {advice}"
    )


def state_bytes(cache: KVPages) -> dict[torch.device, int]:
    """Return the bytes of one slot's states, and of one snapshot of them, on each device. cache: after a first call."""
    used: dict[torch.device, int] = {}
    for part in (part for parts in cache.state_memory.values() for part in parts):
        used[part.device] = used.get(part.device, 0) + part[0].nbytes
    return used


def choose_slots(wanted: int | Literal["auto"], device: torch.device, fitting: int = sys.maxsize) -> int:
    """Return how many requests run at once. "auto": as many as the device computes well together.

    fitting: how many have room for their states; "auto" takes half of it, and leaves the rest to pages.
    """
    if wanted != "auto":
        return wanted
    return max(1, min(AUTO_SLOTS.get(device.type, AUTO_SLOTS["cpu"]), fitting // 2))


def fitting_slots(state: Bytes, room: Bytes) -> int:
    """Return how many slots have room for their states and as many snapshots. state: bytes of one, by device."""
    return min((room[device] // (2 * size) - 1 for device, size in state.items()), default=sys.maxsize)


def room_beside_states(name: str, slots: int, state: Bytes, room: Bytes) -> dict[torch.device, int]:
    """Return the bytes left for pages. Raises ConfigError if the states of so many slots don't fit."""
    needed = {device: size * (2 * slots + 1) for device, size in state.items()}
    fitting = fitting_slots(state, room)
    if slots > fitting:
        raise ConfigError(
            f"models.{name}.slots is {slots}: their states need {_in_words(sum(needed.values()))}, but there is room "
            f"for {_in_words(sum(room[device] for device in needed))}; {max(fitting, 0)} slots would fit"
        )
    return {device: size - needed.get(device, 0) for device, size in room.items()}


def fit_pages(
    name: str, wanted: int | Literal["auto"], *, column: Bytes, room: Bytes, slots: int, max_length: int, max_query: int
) -> int:
    """Return how many KV pages to allocate, not counting the page for padding.

    Args:
        wanted: the number of tokens. "auto": as many as fit, but not more than all slots together can ever hold.
        column: bytes of one token.
        max_length, max_query: tokens of a request, and columns beyond them that a call may write.

    Raises:
        ConfigError: they don't fit, or can't hold one request; the message says what would fit.
    """
    fitting = min(room[device] // (size * PAGE_SIZE) for device, size in column.items()) - 1
    per_request = -(-(max_length + max_query) // PAGE_SIZE)
    pages = min(fitting, slots * per_request) if wanted == "auto" else -(-wanted // PAGE_SIZE)
    tokens, needed, free = fitting * PAGE_SIZE, sum(column.values()) * PAGE_SIZE, sum(room[device] for device in column)
    if wanted != "auto" and pages > fitting:
        raise ConfigError(
            f"models.{name}.kv_tokens is {wanted}: they need {_in_words((pages + 1) * needed)}, but there is room for "
            f"{_in_words(free)}; {max(tokens, 0)} tokens would fit"
        )
    if pages < per_request:
        raise ConfigError(
            f"models.{name}.max_length is {max_length}: a request and what is computed beyond it need "
            f"{per_request * PAGE_SIZE} tokens of keys and values, but there is room for {max(pages, 0) * PAGE_SIZE} "
            f"({_in_words(free)}); set max_length to {max(pages * PAGE_SIZE - max_query, 0)} or less, or raise "
            "kv_tokens or memory_gib"
        )
    return pages


def room_for_pages(
    devices: Iterable[torch.device], used: Bytes, limit: int | None, *, reserved: Bytes = MappingProxyType({})
) -> dict[torch.device, int]:
    """Return the bytes for KV pages after loading.

    Without a limit a CPU's cache gets a quarter of the free memory only.

    used: bytes of the weights.
    limit: for both, per device.
    reserved: bytes that CUDA graphs will need, outside the limit.
    """
    room = {
        device: max(_within(free_bytes(device) - reserved.get(device, 0), used.get(device, 0), limit), 0)
        for device in devices
    }
    if limit is not None:
        return room
    return {
        device: int(free_bytes(device) * CPU_SHARE) if device.type == "cpu" else size for device, size in room.items()
    }


def room_for_weights(devices: Iterable[torch.device], limit: int | None) -> int:
    """Return the bytes for weights before loading, on all devices together. limit: per device."""
    return sum(_within(free_bytes(device), 0, limit) for device in devices)


def _within(free: int, used: int, limit: int | None) -> int:
    usable = int(free * USABLE)
    return usable if limit is None else max(min(usable, limit - used), 0)


def _in_words(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
