"""The adapters of one model: which LoRA weights are in which slot of its layers, and which rows run with them.

Weights are read in a thread beside the loop, and stay until a slot is needed.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Generic, TypeVar

import torch

from actors.loops.row import Row
from actors.wire.messages import Adapter
from decoding.errors import ConfigError, InvalidRequestError
from engine.layers.lora import LoraLayers
from engine.loading.lora import LoraWeights, read_lora

_log = logging.getLogger(__name__)

_Row = TypeVar("_Row", bound=Row)


class _Held(Generic[_Row]):
    def __init__(self, slot: int | None, reading: Future[tuple[LoraWeights, LoraWeights | None]] | None = None) -> None:
        self.slot = slot  # None: its weights are not in the layers yet
        self.reading = reading
        self.rows: set[_Row] = set()
        self.is_leaving = False  # whether its slot is promised to another one: new rows wait until it is back

    @property
    def in_use(self) -> bool:
        """Whether a row runs with it, or will once it has a KV slot."""
        return any(row.adapter_slot is not None for row in self.rows)

    @property
    def precedence(self) -> tuple[bool, float, int]:
        return min(row.precedence for row in self.rows)


class AdapterTable(Generic[_Row]):
    """The adapters by version, the least recently used first."""

    def __init__(
        self, lora: LoraLayers | None, read: Callable[[str], LoraWeights] = read_lora, heads: LoraLayers | None = None
    ) -> None:
        """
        lora: with the adapters that were loaded at the start; None: the model takes none.
        heads: of the model's heads, with the same slots; None: they take none.
        """
        versions = [] if lora is None else lora.versions
        self._lora, self._read, self._heads = lora if versions else None, read, heads
        self._held: dict[str, _Held[_Row]] = {
            version: _Held(slot) for slot, version in enumerate(versions, 1) if version
        }
        taken = {held.slot for held in self._held.values()}
        self._free = [slot for slot in range(1, len(versions) + 1) if slot not in taken]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def begin(self, row: _Row) -> None:
        """Give the row its adapter's slot, now or once the weights are there.

        Raises InvalidRequestError if the model takes no adapters.
        """
        adapter = row.adapter
        if adapter is None:
            return
        if self._lora is None:
            raise InvalidRequestError(f"the target takes no adapters, such as {adapter.name!r}", field="model")
        held = self._held.pop(adapter.version, None)
        if held is None:
            held = _Held(None, self._pool.submit(self._load, self._lora, adapter))
        self._held[adapter.version] = held
        held.rows.add(row)
        row.adapter_slot = None if held.is_leaving else held.slot

    def release(self, row: _Row) -> None:
        """Forget a row that was removed. Its adapter's weights stay until their slot is needed, if they have one."""
        held = None if row.adapter is None else self._held.get(row.adapter.version)
        if row.adapter is None or held is None:
            return
        held.rows.discard(row)
        if not held.rows and held.slot is None:
            del self._held[row.adapter.version]
            if held.reading is not None:
                held.reading.cancel()

    def make_ready(self) -> list[tuple[_Row, BaseException]]:
        """Put weights that were read into free slots. Return the rows whose adapter can't be loaded, with the error."""
        failed: list[tuple[_Row, BaseException]] = []
        for version, held in list(self._held.items()):
            if held.is_leaving and held.slot is not None and not held.in_use:
                self._free.append(self._evict(version, held.slot))
        waiting: list[_Held[_Row]] = []
        for version, held in list(self._held.items()):
            if held.slot is not None or held.reading is None or not held.reading.done():
                continue
            error = held.reading.exception()
            if error is not None:
                del self._held[version]
                failed += [(row, error) for row in held.rows]
            else:
                waiting.append(held)
        for held in sorted(waiting, key=attrgetter("precedence")):
            self._find_slot(held)
        return failed

    def _find_slot(self, held: _Held[_Row]) -> None:
        """Put weights into a slot, now or in a later turn: until then one adapter in use takes no new rows."""
        slot = self._free_slot()
        if slot is not None:
            assert held.reading is not None
            self._write(slot, held, *held.reading.result())
            return
        others = [other for other in self._held.values() if other.slot is not None]
        if not any(other.is_leaving for other in others):
            others[0].is_leaving = True

    def _write(self, slot: int, held: _Held[_Row], weights: LoraWeights, of_heads: LoraWeights | None) -> None:
        assert self._lora is not None
        try:
            self._lora.write(slot, weights.version, weights.pairs)
            if self._heads is not None:
                own = of_heads or LoraWeights("", {})
                self._heads.write(slot, own.version, own.pairs)
        except torch.OutOfMemoryError:
            self._free.append(slot)  # a later turn tries again
            return
        held.slot, held.reading = slot, None
        for row in held.rows:
            row.adapter_slot = slot

    def _free_slot(self) -> int | None:
        """Take a slot that no row needs; None if there is none now."""
        if self._free:
            return self._free.pop(0)
        for version, held in self._held.items():
            if held.slot is not None and not held.in_use:
                return self._evict(version, held.slot)
        return None

    def _evict(self, version: str, slot: int) -> int:
        """Forget the weights in a slot that no row needs. Rows that came too late for them begin again."""
        for row in self._held.pop(version).rows:
            self.begin(row)
        return slot

    def _load(self, lora: LoraLayers, adapter: Adapter) -> tuple[LoraWeights, LoraWeights | None]:
        weights, of_heads = self._load_one(lora, adapter), None
        if self._heads is not None and adapter.heads is not None:
            try:
                of_heads = self._load_one(self._heads, adapter.heads)
            except InvalidRequestError as error:
                _log.warning("%s; heads draft without it", error)
        return weights, of_heads

    def _load_one(self, lora: LoraLayers, adapter: Adapter) -> LoraWeights:
        try:
            weights = self._read(adapter.path)
            if weights.version != adapter.version:
                raise ConfigError(f"{adapter.path!r} has changed since; load it again")
            lora.check(weights.pairs)
        except ConfigError as error:
            raise InvalidRequestError(
                f"the adapter {adapter.name!r} can't be loaded: {error}", field="model"
            ) from error
        return weights
