"""One model over several devices: a group of processes that each hold a part of every layer and run each step together.

Rank 0 has the loop; it announces what it does to its runner and its cache, and the other ranks do the same. The parts
and the sums between them are transformers' (`tp_plan`, torch.distributed). Knows nothing of who starts the processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from actors.loading.checkpoint import ModelSpec
from actors.model.forward_input import RowInput
from actors.model.kv_slots import SlotCache
from actors.model.runner import Runner
from decoding.errors import ConfigError, UnavailableError

_PATIENCE = timedelta(days=365)  # a group without requests waits; when a rank dies, the others' connections break


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group of `size`, which meets at rank 0's address."""

    rank: int
    size: int
    host: str
    port: int
    device: str = "cpu"  # "cuda:1", …


class _Forward(msgspec.Struct, frozen=True, tag=True):
    rows: list[RowInput]
    last_only: bool


class _Move(msgspec.Struct, frozen=True, tag=True):
    slot: int
    source: list[int]
    target: int


class _Copy(msgspec.Struct, frozen=True, tag=True):
    source: int
    target: int
    start: int
    end: int


class _Stop(msgspec.Struct, frozen=True, tag=True):
    pass


_Order = _Forward | _Move | _Copy | _Stop


class TensorParallelGroup:
    """This process's place in its group, once all others have joined."""

    def __init__(self, rank: Rank) -> None:
        """Waits for the others."""
        self.rank = rank
        device = torch.device(rank.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = TCPStore(rank.host, rank.port, rank.size, is_master=rank.rank == 0, timeout=timedelta(minutes=10))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size, timeout=_PATIENCE)
        self._orders = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def announce(self, order: _Order) -> None:
        """Rank 0: let the others do the same."""
        data = bytearray(msgspec.msgpack.encode(order))
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._orders)
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._orders)

    def hear(self) -> _Order:
        """The other ranks: what rank 0 does next."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._orders)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        order: _Order = msgspec.msgpack.decode(data.numpy().tobytes(), type=_Order)
        return order

    def close(self) -> None:
        """Leave; rank 0 sends the others home first."""
        if self.rank.rank == 0:
            self.announce(_Stop())
        dist.destroy_process_group()


def load_sharded_runner(spec: ModelSpec, group: TensorParallelGroup) -> Runner:
    """This rank's runner: of rank 0 one that the others follow.

    Raises:
        ConfigError: the model can't be loaded in parts, or the specification has what parts can't have.
    """
    for field, usual in (("quantization", None), ("adapter", None), ("kv_dtype", "auto")):
        if getattr(spec, field) != usual:
            raise ConfigError(f"models.{spec.name}.{field}: does not go together with tensor_parallel; leave it out")
    if spec.slots == "auto":
        raise ConfigError(f"models.{spec.name}.slots: with tensor_parallel, set a number; 'auto' is for one device")
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    model = load_shard(spec.path, group, revision=spec.revision, dtype=spec.dtype)
    size = {"slots": spec.slots, "max_length": spec.max_length, "max_query": max(spec.prefill_chunk, 64)}
    return ShardedRunner(model, group, **size) if group.rank.rank == 0 else Runner(model, **size)


def follow_in_group(spec: ModelSpec, rank: Rank) -> None:
    """The whole life of a rank other than 0."""
    group = TensorParallelGroup(rank)
    follow(load_sharded_runner(spec, group), group)
    group.close()


def load_shard(
    path: str, group: TensorParallelGroup, *, revision: str | None = None, dtype: str = "auto"
) -> PreTrainedModel:
    """This rank's part of a checkpoint's model.

    Raises:
        ConfigError: the model's authors gave it no plan, or its heads can't be divided by the number of ranks.
    """
    plan = DistributedConfig(tp_size=group.rank.size, tp_plan="auto")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, distributed_config=plan, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't load {path!r} in {group.rank.size} parts: {error}") from error
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % group.rank.size:
        raise ConfigError(f"{path!r} has {heads} key-value heads, which {group.rank.size} devices can't share evenly")
    return model


class ShardedRunner(Runner):
    """Rank 0's runner. The other ranks have plain ones of the same size, and `follow`."""

    def __init__(
        self, model: PreTrainedModel, group: TensorParallelGroup, *, slots: int, max_length: int, max_query: int
    ) -> None:
        super().__init__(model, slots=slots, max_length=max_length, max_query=max_query)
        self.single_device = False
        self._group = group
        self.cache = _ShardedCache(group, slots=slots, capacity=self.cache.capacity)

    def logits(self, rows: Sequence[RowInput], *, last_only: bool = False) -> Tensor:
        self._group.announce(_Forward(list(rows), last_only))
        try:
            return super().logits(rows, last_only=last_only)
        except torch.OutOfMemoryError as error:  # the others wait in the midst of a layer, so there is no way back
            raise UnavailableError(f"rank 0 ran out of memory: {error}") from error


class _ShardedCache(SlotCache):
    def __init__(self, group: TensorParallelGroup, *, slots: int, capacity: int) -> None:
        super().__init__(slots=slots, capacity=capacity)
        self._group = group

    def move(self, slot: int, source: Sequence[int], target: int) -> None:
        self._group.announce(_Move(slot, list(source), target))
        super().move(slot, source, target)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self._group.announce(_Copy(source, target, start, end))
        super().copy(source, target, start, end)


def follow(runner: Runner, group: TensorParallelGroup) -> None:
    """Do what rank 0 does until it stops, or until its connection breaks (RuntimeError)."""
    while True:
        match group.hear():
            case _Forward(rows, last_only):
                runner.logits(rows, last_only=last_only)
            case _Move(slot, source, target):
                runner.cache.move(slot, source, target)
            case _Copy(source, target, start, end):
                runner.cache.copy(source, target, start, end)
            case _Stop():
                return
