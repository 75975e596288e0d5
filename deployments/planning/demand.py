"""A model to serve, as the planner sees it. Reads nothing."""

from dataclasses import dataclass
from typing import Literal

from deployments.configuration.model import MAX_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Estimates from a checkpoint's headers; None: unknown."""

    weights_bytes: int
    kv_bytes: int | None = None  # keys and values of one token, in all layers
    positions: int | None = None


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
    prefill_chunk: int = 256
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
    def weights_bytes(self) -> int:
        """Bytes on each device; 0 if unknown."""
        return 0 if self.size is None else self.size.weights_bytes // self.parts

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of a token on each device."""
        size = self.size
        return None if size is None or size.kv_bytes is None else size.kv_bytes * self.caches // self.parts

    @property
    def longest(self) -> int | None:
        """Tokens of a request, as configured or as the model has positions."""
        if self.max_length is not None:
            return self.max_length
        positions = None if self.size is None else self.size.positions
        return None if positions is None else min(positions, MAX_LENGTH)
