"""As many pages as fit are allocated; what doesn't fit is refused with the size that would."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from decoding.errors import ConfigError
from decoding.sampling.penalties import TOKEN_BYTES
from engine.kernels.native import library
from engine.loading import host as memory_rules
from engine.loading import memory_budget
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.memory_budget import (
    GIB,
    check_weights,
    choose_slots,
    column_bytes,
    fit_pages,
    room_for_pages,
    weights_on_devices,
)
from engine.loading.runners import load_pair, load_runner
from engine.loading.supported import try_out
from engine.model.kv_pages import KVPages
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
    assert column_bytes(cache) == {CPU: 4 * values + TOKEN_BYTES}
    assert column_bytes(cache, torch.bfloat16) == {CPU: 2 * values + TOKEN_BYTES}


def test_weights_are_counted_where_they_are() -> None:
    module = nn.Linear(8, 4, dtype=torch.bfloat16)
    module.register_buffer("scale", torch.zeros(3))
    assert weights_on_devices(module) == {CPU: 2 * (8 * 4 + 4) + 4 * 3}


def fit(wanted: int | Literal["auto"], room: dict[torch.device, int], **changes: Any) -> int:
    """Fit pages of 16 tokens of 10 bytes each. A request needs 5 of them."""
    options: dict[str, Any] = {"column": {CPU: 10}, "slots": 4, "max_length": 64, "max_query": 16}
    return fit_pages("m", wanted, room=room, **options | changes)


def test_pages_of_a_layer_are_on_its_device() -> None:
    """A model over two devices: the CPU and the meta device."""
    cache = KVPages(slots=2, capacity=8)
    for device, heads in (("cpu", 2), ("meta", 3), ("meta", 3)):
        states = torch.zeros(1, heads, 1, 4, device=device)
        cache.add_layer(nn.Identity(), states, states)
    assert column_bytes(cache) == {
        torch.device("cpu"): 2 * 2 * 4 * 4,
        torch.device("meta"): 2 * 2 * 3 * 4 * 4 + TOKEN_BYTES,
    }


def test_auto_takes_what_fits_but_not_more_than_all_slots_can_hold() -> None:
    assert fit("auto", {CPU: 1600}) == 9  # and one for padding
    assert fit("auto", {CPU: GIB}) == 4 * 5
    assert fit("auto", {CPU: GIB, GPU: 960}, column={CPU: 10, GPU: 10}) == 5  # the fuller device limits both


def test_a_number_of_tokens_is_rounded_up_to_pages() -> None:
    assert fit(81, {CPU: 1600}) == 6


def test_more_tokens_than_fit_are_refused_with_the_number_that_would() -> None:
    message = r"models\.m\.kv_tokens is 500: .* but there is room for .*; 144 tokens would fit"
    with pytest.raises(ConfigError, match=message):
        fit(500, {CPU: 1600})


@pytest.mark.parametrize("wanted", ["auto", 60])
def test_a_length_that_does_not_fit_is_refused_with_the_one_that_would(wanted: Any) -> None:
    message = r"models\.m\.max_length is 64: .* need 80 tokens .* set max_length to 48 or less"
    with pytest.raises(ConfigError, match=message):
        fit(wanted, {CPU: 960 - 160})


def test_auto_slots_depend_on_the_device() -> None:
    assert [choose_slots("auto", CPU), choose_slots("auto", GPU), choose_slots(3, GPU)] == [64, 256, 3]


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    smaller = {"dtype: bfloat16": 5 * GIB, "quantization: nf4": 3 * GIB}
    check_weights("m", 10 * GIB, smaller, room=10 * GIB)
    with pytest.raises(
        ConfigError, match=r"need 10\.00 GiB.* room for 4\.00 GiB: quantization: nf4 would need 3\.00 GiB"
    ):
        check_weights("m", 10 * GIB, smaller, room=4 * GIB)
    with pytest.raises(ConfigError, match=r"a model of 20% of its size would fit"):
        check_weights("m", 10 * GIB, smaller, room=2 * GIB)


def test_the_limit_counts_weights_and_pages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 1000)
    assert room_for_pages([CPU, GPU], {CPU: 300}, None) == {CPU: 250, GPU: 900}
    assert room_for_pages([CPU], {CPU: 300}, 700) == {CPU: 400}
    assert room_for_pages([CPU], {CPU: 300}, 5000) == {CPU: 900}
    assert room_for_pages([CPU], {CPU: 300}, 200) == {CPU: 0}


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory_budget.free_bytes(CPU)
    assert machine > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 400\n")
    monkeypatch.setattr(memory_rules, "CGROUP", tmp_path)
    assert memory_budget.free_bytes(CPU) == 2400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_budget.free_bytes(CPU) > 10_000
    monkeypatch.setattr(memory_rules, "CGROUP", tmp_path / "none")
    assert memory_budget.free_bytes(CPU) > 10_000


def test_pages_of_a_loaded_model(folder: Path) -> None:
    weights = sum(weights_on_devices(load_model(spec(folder))).values())
    page = 16 * (4 * 3 * 2 * 2 * 8 + TOKEN_BYTES)

    def pages(**options: Any) -> int:
        return load_runner(spec(folder, prefill_chunk=64, **options)).cache.allocator.pages

    assert pages(memory_bytes=weights + 12 * page) == 11
    assert pages(slots=3) == 3 * (64 + 64) // 16  # columns: max_length, and the most tokens of a call
    assert pages(kv_tokens=200) == 13
    with pytest.raises(ConfigError, match=r"models\.m\.kv_tokens is 200: .*; 176 tokens would fit"):
        pages(memory_bytes=weights + 12 * page, kv_tokens=200)
    with pytest.raises(ConfigError, match=r"models\.m: the weights need .*: dtype: bfloat16 would need"):
        load_model(spec(folder, memory_bytes=weights - 10_000))


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_packed_output_layer_counts_beside_its_embedding(dtype: str, itemsize: int, tmp_path: Path) -> None:
    tiny_model("llama-gqa", tie_word_embeddings=True).save_pretrained(tmp_path)
    options = spec(tmp_path, dtype=dtype, prefill_chunk=64)
    weights = sum(weights_on_devices(load_model(options)).values())
    copy, page = 64 * 32 * itemsize, 16 * (itemsize * 3 * 2 * 2 * 8 + TOKEN_BYTES)
    runner = load_runner(replace(options, memory_bytes=weights + copy + 12 * page))
    assert runner.cache.allocator.pages == 11


def test_a_request_may_be_as_long_as_the_model_has_positions(folder: Path) -> None:
    runner = load_runner(spec(folder, max_length=None, slots="auto"))
    assert (runner.max_length, runner.cache.slots) == (256, 64)


def test_a_target_and_its_colocated_drafter_share_the_memory(folder: Path) -> None:
    weights = sum(weights_on_devices(load_model(spec(folder))).values())
    page = 16 * (4 * 3 * 2 * 2 * 8 + TOKEN_BYTES)
    runners = load_pair(
        spec(folder, prefill_chunk=64, memory_bytes=2 * (weights + 12 * page)), spec(folder, prefill_chunk=64)
    )
    assert [runner.cache.allocator.pages for runner in runners] == [11, 11]


def test_a_colocated_drafter_needs_no_longer_texts_than_its_target(folder: Path) -> None:
    """It has as many pages, which hold one request of the longest, so its own length could leave no room."""
    target = spec(folder, max_length=128, kv_tokens=192, prefill_chunk=64)
    for configured, expected in ((None, 128), (48, 48)):
        runners = load_pair(target, spec(folder, max_length=configured, prefill_chunk=64))
        assert [runner.max_length for runner in runners] == [128, expected]
