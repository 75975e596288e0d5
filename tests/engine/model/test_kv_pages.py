"""Pages hold what was written to a slot's columns, also after moves and copies, and take memory only when written."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model

HEADS, SIZE = 2, 4
TEXT = [(5 + 7 * index) % 64 for index in range(40)]


def make_cache(*, slots: int = 3, capacity: int = 16, pages: int | None = None) -> KVPages:
    """Return pages of two layers."""
    cache = KVPages(slots=slots, capacity=capacity, pages=pages, page_size=4)
    states = torch.zeros(1, HEADS, 1, SIZE)
    for _ in range(2):
        cache.add_layer(torch.nn.Identity(), states, states)
    return cache


def write(cache: KVPages, slot: int, start: int, values: list[int]) -> None:
    """Write a number to each column."""
    cache.prepare_writes([(slot, start, start + len(values))])
    for column, value in enumerate(values, start):
        for layer, (keys, stored) in enumerate(cache.layers.values()):
            keys[cache.page(slot, column), :, :, column % 4] = value + layer
            stored[cache.page(slot, column), :, column % 4] = -value - layer


def read(cache: KVPages, slot: int, count: int) -> list[int]:
    """Return the numbers in a slot's first columns, which must be the same in all layers, keys and values."""
    columns = [(cache.page(slot, column), column % 4) for column in range(count)]
    texts = []
    for layer, (keys, stored) in enumerate(cache.layers.values()):
        texts.append([whole(keys[page, :, :, offset]) - layer for page, offset in columns])
        texts.append([-whole(stored[page, :, offset]) - layer for page, offset in columns])
    assert all(text == texts[0] for text in texts)
    return texts[0]


def whole(states: Tensor) -> int:
    assert len(states.unique()) == 1
    return int(states.flatten()[0])


def test_columns_move_within_a_slot() -> None:
    cache = make_cache()
    write(cache, 1, 0, list(range(12)))
    cache.move(1, [5, 7, 10], 3)
    assert read(cache, 1, 6) == [0, 1, 2, 5, 7, 10]


def test_a_fork_that_writes_does_not_change_the_other() -> None:
    cache = make_cache()
    write(cache, 0, 0, [1, 2, 3, 4, 5, 6])
    for slot in (1, 2):
        cache.fork(0, slot, 6)
    write(cache, 1, 6, [7])
    write(cache, 2, 5, [8])
    write(cache, 0, 4, [9, 9, 9])
    assert [read(cache, slot, 6) for slot in (0, 1, 2)] == [[1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 8]]


def test_a_copy_is_made_before_its_source_is_used_again() -> None:
    cache = make_cache(pages=3)
    write(cache, 0, 0, [1, 2])
    cache.fork(0, 1, 2)
    cache.fork(0, 2, 2)
    for slot in (1, 2):
        cache.reserve(slot, 2, 3)  # copies for both are due
    cache.give_back(0)
    write(cache, 1, 2, [5])
    write(cache, 2, 2, [6])
    assert [read(cache, slot, 3) for slot in (1, 2)] == [[1, 2, 5], [1, 2, 6]]


def test_tables_on_other_devices_follow() -> None:
    cache = make_cache()
    other = torch.device("cpu", 0)
    mirror = cache._mirrors[other] = torch.zeros_like(cache.tables)
    write(cache, 0, 0, list(range(9)))
    cache.fork(0, 2, 9)
    write(cache, 2, 8, [1])
    assert mirror is cache.tables_on(other)
    assert mirror.equal(cache.tables)
    cache.clear_all()
    cache.flush()
    assert not mirror.any()


def test_pages_are_zero_and_take_no_memory_before_they_are_written() -> None:
    cache = KVPages(slots=1, capacity=2**20, page_size=16)
    states = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    before = resident_bytes()
    cache.add_layer(torch.nn.Identity(), states, states)  # 2 GiB
    keys, values = next(iter(cache.layers.values()))
    assert keys.shape == (2**16 + 1, 8, 64, 16)
    assert values.shape == (2**16 + 1, 8, 16, 64)
    assert not keys[2**15].any()
    assert resident_bytes() - before < 2**26


def test_pages_have_their_own_type() -> None:
    cache = KVPages(slots=1, capacity=16)
    cache.dtype = torch.float8_e4m3fn
    states = torch.zeros(1, HEADS, 1, SIZE)
    cache.add_layer(torch.nn.Identity(), states, states)
    assert {store.dtype for store in next(iter(cache.layers.values()))} == {torch.float8_e4m3fn}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_copy_for_which_memory_ran_out_is_made_later() -> None:
    cache = make_cache()
    write(cache, 0, 0, [1, 2])
    cache.fork(0, 1, 2)
    cache.reserve(1, 2, 3)
    with mock.patch.object(cache, "apply", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        cache.flush()
    write(cache, 1, 2, [5])
    assert read(cache, 1, 3) == [1, 2, 5]


def runner(folder: Path, kv_dtype: str) -> Runner:
    spec = ModelSpec(
        name="m", path=str(folder), device="cpu", slots=2, max_length=64, prefill_chunk=16, kv_dtype=kv_dtype
    )
    return load_runner(spec)


def logits(runner: Runner) -> Tensor:
    """Return [T, V] logits, computed in chunks, and the last tokens one by one."""
    steps = [(0, 16), (16, 32), *((start, start + 1) for start in range(32, 40))]
    return torch.cat([runner.logits([RowInput(1, start, TEXT[start:end])]) for start, end in steps])


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", 0.02), ("float16", 0.005), ("float8_e4m3fn", 0.2)])
def test_slots_of_fewer_bits(kv_dtype: str, tolerance: float, tmp_path: Path) -> None:
    tiny_model("llama-gqa").save_pretrained(tmp_path)
    exact, coarse = runner(tmp_path, "auto"), runner(tmp_path, kv_dtype)
    stores = [store for stores in coarse.cache.layers.values() for store in stores]
    assert {str(store.dtype) for store in stores} == {f"torch.{kv_dtype}"}
    expected = logits(exact)
    assert (logits(coarse) - expected).norm() < tolerance * expected.norm()


def test_what_is_written_is_rounded_once(tmp_path: Path) -> None:
    """Slots contain what the layers computed, in the slots' dtype, also after a path of a tree was moved."""
    tiny_model("llama-gqa").save_pretrained(tmp_path)
    exact, coarse = runner(tmp_path, "auto"), runner(tmp_path, "float8_e4m3fn")
    for model_runner in (exact, coarse):
        model_runner.logits([RowInput(0, 0, TEXT[:3], trunk=0, paths=[[0], [0, 1], [0, 2]])])
        model_runner.compact(0, 0, [0, 2])
    first = [next(iter(model_runner.cache.layers.values()))[0][1, ..., :2] for model_runner in (exact, coarse)]
    assert torch.equal(first[1].float(), first[0].to(torch.float8_e4m3fn).float())
