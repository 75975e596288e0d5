"""Tensor parallelism: a group of processes, each with a part of every layer, runs one model step by step.

Rank 0 runs the loop. It broadcasts each call to its runner and its cache, and the other ranks repeat it. Layers are
split by transformers' plan (`tp_plan`). Our own compute the parts (engine/layers/sharded.py), or, where the plan splits
what they can't compute in parts, transformers does, with unpacked weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from decoding.errors import ConfigError, UnavailableError
from engine.layers.faster_layers import use_faster_layers
from engine.layers.sharded import can_take_parts, exchange_results, take_parts
from engine.loading.checkpoint import (
    ModelSpec,
    check_memory,
    errors_of,
    load_config,
    make_skeleton,
    quantization_options,
    read_weights,
)
from engine.loading.memory_budget import (
    Bytes,
    choose_slots,
    column_bytes,
    fit_pages,
    room_for_pages,
    room_for_weights,
    tied_output_bytes,
    weights_on_devices,
)
from engine.loading.quantization import round_activations
from engine.loading.settings import context_length, is_trimmed
from engine.loading.supported import try_out
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.state_layers import carries_known_states

_TIMEOUT = timedelta(days=365)  # idle groups wait for requests; if a rank dies, the others' connections break


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group of `size` processes, which meet at rank 0's address."""

    rank: int
    size: int
    host: str
    port: int
    device: str = "cpu"  # "cuda:1", …


class _Forward(msgspec.Struct, frozen=True, tag=True):
    rows: list[RowInput]


class _Move(msgspec.Struct, frozen=True, tag=True):
    slot: int
    source: list[int]
    target: int


class _ChangePages(msgspec.Struct, frozen=True, tag=True):
    entries: list[tuple[int, int, int]]  # as in KVPages.apply
    copies: list[tuple[int, int]]


class _Stop(msgspec.Struct, frozen=True, tag=True):
    pass


_Call = _Forward | _Move | _ChangePages | _Stop


class TensorParallelGroup:
    """This process's membership in its tensor-parallel group."""

    def __init__(self, rank: Rank) -> None:
        """Wait until all ranks have joined."""
        self.rank = rank
        device = torch.device(rank.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = TCPStore(rank.host, rank.port, rank.size, is_master=rank.rank == 0, timeout=timedelta(minutes=10))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=_TIMEOUT)
        self._calls = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def broadcast(self, call: _Call) -> None:
        """Send a call to the other ranks; only rank 0 does this."""
        data = bytearray(msgspec.msgpack.encode(call))
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._calls)
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._calls)

    def receive(self) -> _Call:
        """Wait for rank 0's next call; only the other ranks do this."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._calls)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._calls)
        call: _Call = msgspec.msgpack.decode(data.numpy().tobytes(), type=_Call)
        return call

    def least(self, value: int) -> int:
        """Return the least of all ranks' values; all call it at once."""
        least = torch.tensor([value])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._calls)
        return int(least)

    def close(self) -> None:
        """Leave the group; rank 0 first tells the others to stop."""
        if self.rank.rank == 0:
            self.broadcast(_Stop())
        dist.destroy_process_group()


def load_sharded_runner(spec: ModelSpec, group: TensorParallelGroup) -> Runner:
    """Return this rank's runner; the other ranks repeat what rank 0's does.

    Raises ConfigError if the model can't be loaded, served or split, or needs more memory than there is, or a setting
    does not work with tensor_parallel.
    """
    for field, usual in (("adapter", None), ("adapters", {}), ("adapters_at_run_time", 0), ("kv_dtype", "auto")):
        if getattr(spec, field) != usual:
            raise ConfigError(f"models.{spec.name}.{field}: does not go together with tensor_parallel; leave it out")
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    config = load_config(spec)
    if is_trimmed(config):
        raise ConfigError(f"models.{spec.name}.tensor_parallel: a drafter with a trimmed vocabulary runs on one device")
    least = group.least(room_for_weights([torch.device(group.rank.device)], spec.memory_bytes))
    skeleton = make_skeleton(spec, config)
    if carries_known_states(skeleton):
        raise ConfigError(f"models.{spec.name}.tensor_parallel: layers that carry a state run on one device")
    _check_heads(spec, config, group.rank.size)
    on_own_layers = can_take_parts(skeleton)
    if not on_own_layers:
        if spec.quantization is not None:
            raise ConfigError(
                f"models.{spec.name}.quantization: {type(skeleton).__name__} is split over devices with unpacked "
                "weights only; leave it out, or set tensor_parallel to 1"
            )
        spec = replace(spec, unpacked=True)
        load_config(spec)  # raises an error if that does not go together
    check_memory(spec, config, skeleton, room=least)
    plan = DistributedConfig(tp_size=group.rank.size, tp_plan="auto")
    model = read_weights(spec, distributed_config=plan, **quantization_options(spec, config, skeleton))
    weights = _use_own_layers(spec, model) if on_own_layers else weights_on_devices(model)
    size: dict[str, int] = {
        "slots": choose_slots(spec.slots, model.device),
        "max_length": context_length(model.config, spec.max_length),
        "max_query": max(spec.prefill_chunk, 64),
    }
    column, room = _memory(spec, model, weights, group)
    pages = fit_pages(spec.name, spec.kv_tokens, column=column, room=room, **size)
    if group.rank.rank == 0:
        return ShardedRunner(model, group, **size, pages=pages)
    runner = Runner(model, **size, lora=None)
    runner.use_cache(_FollowingCache(slots=size["slots"], capacity=runner.cache.capacity, pages=pages))
    return runner


def _check_heads(spec: ModelSpec, config: PretrainedConfig, ranks: int) -> None:
    text = config.get_text_config(decoder=True)
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks:
        fitting = max(count for count in range(1, ranks) if heads % count == 0)
        raise ConfigError(
            f"models.{spec.name}.tensor_parallel: {spec.path!r} has {heads} key-value heads, which {ranks} devices "
            f"can't share evenly; set it to {fitting}"
        )


def _use_own_layers(spec: ModelSpec, model: PreTrainedModel) -> Bytes:
    """Let our layers compute this rank's part of a model; return the bytes of its weights."""
    exchanges = take_parts(model)
    weights, tied = weights_on_devices(model), tied_output_bytes(model)
    if spec.activations is not None:
        round_activations(spec.name, model)
    use_faster_layers(model, deterministic=spec.deterministic)
    exchange_results(model, exchanges)
    return {device: size + tied.get(device, 0) for device, size in weights.items()}


def _memory(spec: ModelSpec, model: PreTrainedModel, weights: Bytes, group: TensorParallelGroup) -> tuple[Bytes, Bytes]:
    """Return the bytes of a token's keys and values here, and those of as many tokens as every rank has room for."""
    with errors_of(spec):
        column = column_bytes(try_out(model))
    room = room_for_pages(column, weights, spec.memory_bytes)
    tokens = group.least(min(room[device] // size for device, size in column.items()))
    return column, {device: tokens * size for device, size in column.items()}


def follow_in_group(spec: ModelSpec, rank: Rank) -> None:
    """Load a rank other than 0 and run it until rank 0 stops."""
    group = TensorParallelGroup(rank)
    follow(load_sharded_runner(spec, group), group)
    group.close()


class ShardedRunner(Runner):
    """Rank 0's runner. The other ranks have plain runners of the same size, driven by `follow`."""

    def __init__(
        self, model: PreTrainedModel, group: TensorParallelGroup, *, pages: int | None = None, **size: int
    ) -> None:
        """size: as in `Runner`."""
        super().__init__(model, **size, lora=None)
        self._group = group
        slots, capacity = self.cache.slots, self.cache.capacity
        self.use_cache(_ShardedCache(group, slots=slots, capacity=capacity, pages=pages))

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        self.cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        self._group.broadcast(_Forward(list(rows)))
        try:
            return super().logits(rows)
        except torch.OutOfMemoryError as error:  # the other ranks are waiting inside a layer
            raise UnavailableError(f"rank 0 ran out of memory: {error}") from error


class _ShardedCache(KVPages):
    """Rank 0's pages. It alone decides which pages slots have, and sends that to the other ranks."""

    def __init__(self, group: TensorParallelGroup, *, slots: int, capacity: int, pages: int | None) -> None:
        super().__init__(slots=slots, capacity=capacity, pages=pages)
        self._group = group

    def apply(self, entries: Sequence[tuple[int, int, int]], copies: Sequence[tuple[int, int]]) -> None:
        self._group.broadcast(_ChangePages(list(entries), list(copies)))
        super().apply(entries, copies)

    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        self.flush()
        self._group.broadcast(_Move(slot, list(source), target))
        super().move(slot, source, target)


class _FollowingCache(KVPages):
    """Another rank's pages, whose tables rank 0 writes."""

    def prepare_writes(self, extents: Iterable[tuple[int, int, int]]) -> None:
        pass


def follow(runner: Runner, group: TensorParallelGroup) -> None:
    """Repeat rank 0's calls until it stops. Raises RuntimeError if its connection breaks."""
    while True:
        match group.receive():
            case _Forward(rows):
                runner.logits(rows)
            case _Move(slot, source, target):
                runner.cache.move(slot, source, target)
            case _ChangePages(entries, copies):
                runner.cache.apply(entries, copies)
            case _Stop():
                return
