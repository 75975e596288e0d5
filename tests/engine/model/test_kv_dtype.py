"""KV slots of a smaller dtype than the model's: less memory, and nearly the same logits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.replica.replica import load_runner
from engine.loading.checkpoint import ModelSpec
from engine.model.forward_input import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model

TEXT = [(5 + 7 * index) % 64 for index in range(40)]


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
