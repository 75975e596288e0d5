"""As many slots as fit are allocated; what doesn't fit is refused with the size that would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actors.loading import memory_budget
from actors.loading.checkpoint import ModelSpec, load_model
from actors.loading.memory_budget import (
    AUTO_SLOTS,
    GIB,
    check_weights,
    column_bytes,
    fit_slots,
    room_for_slots,
    weights_on_devices,
)
from actors.loading.supported import try_out
from actors.model.kv_pages import KVPages
from actors.replica.replica import load_runner
from decoding.errors import ConfigError
from tests.support.models import tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama-gqa").save_pretrained(tmp_path)
    return tmp_path


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(folder), "device": "cpu", "max_length": 64, **options})


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama-gqa", 3 * 2 * 2 * 8),  # layers, keys and values, heads, dimensions per head
        ("gemma3", 3 * 2 * 1 * 8),
        ("gpt2", 3 * 2 * 4 * 8),
    ],
)
def test_a_token_takes_what_the_layers_keep_of_it(family: str, values: int) -> None:
    cache = try_out(tiny_model(family))
    assert column_bytes(cache) == {CPU: 4 * values}
    assert column_bytes(cache, torch.bfloat16) == {CPU: 2 * values}


def test_weights_are_counted_where_they_are() -> None:
    module = nn.Linear(8, 4, dtype=torch.bfloat16)
    module.register_buffer("scale", torch.zeros(3))
    assert weights_on_devices(module) == {CPU: 2 * (8 * 4 + 4) + 4 * 3}


def test_slots_of_a_layer_are_on_its_device() -> None:
    """A model over two devices: the CPU and the meta device."""
    cache = KVPages(slots=2, capacity=8)
    for device, heads in (("cpu", 2), ("meta", 3), ("meta", 3)):
        states = torch.zeros(1, heads, 1, 4, device=device)
        cache.add_layer(nn.Identity(), states, states)
    column = column_bytes(cache)
    assert column == {torch.device("cpu"): 2 * 2 * 4 * 4, torch.device("meta"): 2 * 2 * 3 * 4 * 4}
    room = {torch.device("cpu"): 100 * column[torch.device("cpu")], torch.device("meta"): 400}
    with pytest.raises(ConfigError, match="columns would fit"):
        fit_slots("m", "auto", slot_bytes={device: 8 * size for device, size in column.items()}, room=room, capacity=8)
    room[torch.device("meta")] = 8 * 4 * column[torch.device("meta")]
    slots = fit_slots("m", "auto", slot_bytes={d: 8 * size for d, size in column.items()}, room=room, capacity=8)
    assert slots == 3  # the fuller device limits both


def test_auto_takes_what_fits_but_not_more_than_a_batch_needs() -> None:
    assert fit_slots("m", "auto", slot_bytes={CPU: 100}, room={CPU: 1099}, capacity=10) == 9
    assert fit_slots("m", "auto", slot_bytes={CPU: 100}, room={CPU: GIB}, capacity=10) == AUTO_SLOTS
    assert fit_slots("m", "auto", slot_bytes={CPU: 100, GPU: 50}, room={CPU: 1000, GPU: 200}, capacity=10) == 3


def test_more_slots_than_fit_are_refused_with_the_number_that_would() -> None:
    assert fit_slots("m", 9, slot_bytes={CPU: 100}, room={CPU: 1000}, capacity=10) == 9
    with pytest.raises(ConfigError, match=r"models\.m\.slots is 3: .* need 4\.00 GiB, .* leave 3\.50 GiB; 2 would fit"):
        fit_slots("m", 3, slot_bytes={CPU: GIB}, room={CPU: int(3.5 * GIB)}, capacity=10)


@pytest.mark.parametrize("wanted", ["auto", 1])
def test_a_slot_that_does_not_fit_is_refused_with_the_length_that_would(wanted: int) -> None:
    with pytest.raises(
        ConfigError, match=r"models\.m\.max_length: two KV slots of 100 columns .*; 50 columns would fit"
    ):
        fit_slots("m", wanted, slot_bytes={CPU: GIB}, room={CPU: GIB}, capacity=100)


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    smaller = {"dtype: bfloat16": 5 * GIB, "quantization: nf4": 3 * GIB}
    check_weights("m", 10 * GIB, smaller, room=10 * GIB)
    with pytest.raises(
        ConfigError, match=r"need 10\.00 GiB.* room for 4\.00 GiB: quantization: nf4 would need 3\.00 GiB"
    ):
        check_weights("m", 10 * GIB, smaller, room=4 * GIB)
    with pytest.raises(ConfigError, match=r"a model of 20% of its size would fit"):
        check_weights("m", 10 * GIB, smaller, room=2 * GIB)


def test_the_limit_counts_weights_and_slots_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1000)
    assert room_for_slots([CPU], {CPU: 300}, None) == {CPU: 900}
    assert room_for_slots([CPU], {CPU: 300}, 700) == {CPU: 400}
    assert room_for_slots([CPU], {CPU: 300}, 5000) == {CPU: 900}
    assert room_for_slots([CPU], {CPU: 300}, 200) == {CPU: 0}


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory_budget.free_bytes(CPU)
    assert machine > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 400\n")
    monkeypatch.setattr(memory_budget, "_CGROUP", tmp_path)
    assert memory_budget.free_bytes(CPU) == 2400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_budget.free_bytes(CPU) > 10_000
    monkeypatch.setattr(memory_budget, "_CGROUP", tmp_path / "none")
    assert memory_budget.free_bytes(CPU) > 10_000


def test_slots_of_a_loaded_model(folder: Path) -> None:
    weights = sum(weights_on_devices(load_model(spec(folder))).values())
    slot = 4 * 3 * 2 * 2 * 8 * (64 + 64)  # columns: max_length, and the most tokens of a call
    options: dict[str, Any] = {"slots": "auto", "prefill_chunk": 64}
    assert load_runner(spec(folder, memory_bytes=weights + 10 * slot, **options)).cache.slots == 9
    assert load_runner(spec(folder, **options)).cache.slots == AUTO_SLOTS
    with pytest.raises(ConfigError, match=r"models\.m\.slots is 10: .*; 9 would fit"):
        load_runner(spec(folder, memory_bytes=weights + 10 * slot, slots=10, prefill_chunk=64))
    with pytest.raises(ConfigError, match=r"models\.m: the weights need .*: dtype: bfloat16 would need"):
        load_model(spec(folder, memory_bytes=weights - 10_000))
