"""Adapters take turns in too few slots, and nothing is kept for rows that are gone."""

from collections.abc import Sequence
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.loops.adapters import AdapterTable
from actors.loops.row import ServedRow
from actors.wire.messages import Adapter, Admit
from decoding.sampling.params import SamplingParams
from engine.layers.lora import LoraLayers
from engine.loading.lora import LoraWeights


class Stage:
    """A table with one slot, and adapters that are named as their versions."""

    def __init__(self, write: Any = lambda *given: None) -> None:
        layers = SimpleNamespace(versions=[""], check=lambda pairs: None, write=write)
        self.table: AdapterTable[ServedRow] = AdapterTable(cast(LoraLayers, layers), self._read)
        self._count = 0

    @staticmethod
    def _read(path: str) -> LoraWeights:
        return cast(LoraWeights, SimpleNamespace(version=path, pairs=()))

    def begin(self, version: str) -> ServedRow:
        """Begin a row."""
        adapter = Adapter(version, version, version)
        admit = Admit(self._count, [1], 1, SamplingParams(max_tokens=1), 0, drafter=False, adapter=adapter)
        row = ServedRow("c", admit)
        self._count += 1
        self.table.begin(row)
        return row

    def turn(self) -> None:
        """Wait until all weights have been read, then make rows ready."""
        wait([held.reading for held in self.table._held.values() if held.reading is not None])
        assert self.table.make_ready() == []


def slots(rows: Sequence[ServedRow]) -> list[int | None]:
    return [row.adapter_slot for row in rows]


def test_an_adapter_that_waits_gets_a_slot_that_others_never_leave_idle() -> None:
    stage = Stage()
    first = stage.begin("a")
    stage.turn()
    second = stage.begin("a")
    other = stage.begin("b")
    stage.turn()
    third = stage.begin("a")
    assert slots([first, second, other, third]) == [1, 1, None, None]
    stage.table.release(first)
    stage.turn()
    assert slots([other, third]) == [None, None]  # the second still needs it, though it may not have a KV slot
    stage.table.release(second)
    stage.turn()
    assert slots([other, third]) == [1, None]
    stage.table.release(other)
    stage.turn()
    assert slots([third]) == [1]


def test_adapters_that_wait_get_slots_in_the_order_of_their_first_requests() -> None:
    stage = Stage()
    first, second, third = (stage.begin(version) for version in "abc")
    later = stage.begin("b")
    for row, others in ((first, [second, third]), (second, [third]), (third, [])):
        stage.turn()
        assert row.adapter_slot == 1
        assert slots(others) == [None] * len(others)
        stage.table.release(row)
        if row is second:
            assert later.adapter_slot == 1  # it came while both waited
            stage.table.release(later)


def test_rows_go_on_if_nobody_waits_for_their_adapters_slot_any_more() -> None:
    stage = Stage()
    first, other = stage.begin("a"), stage.begin("b")
    stage.turn()
    late = stage.begin("a")
    for row in (other, first):
        stage.table.release(row)
    for _ in range(2):
        stage.turn()
    assert slots([late]) == [1]


def test_weights_are_not_kept_for_rows_that_are_gone() -> None:
    stage = Stage()
    busy = stage.begin("a")
    stage.turn()
    for index in range(5):
        row = stage.begin(f"v{index}")
        stage.turn()
        stage.table.release(row)
    assert list(stage.table._held) == ["a"]
    stage.table.release(busy)
    assert list(stage.table._held) == ["a"]  # until its slot is needed


def test_weights_for_which_memory_ran_out_are_written_later() -> None:
    failures = [torch.OutOfMemoryError()]

    def write(*given: object) -> None:
        if failures:
            raise failures.pop()

    stage = Stage(write)
    row = stage.begin("a")
    stage.turn()
    assert row.adapter_slot is None
    stage.turn()
    assert row.adapter_slot == 1


def test_a_target_without_adapters_says_so() -> None:
    stage = Stage()
    stage.table = AdapterTable(None)
    with pytest.raises(ValueError, match="takes no adapters"):
        stage.begin("a")
