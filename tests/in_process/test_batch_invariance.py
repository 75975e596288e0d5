"""A token's logits have the same bits alone, in a chunk, as a draft token and in company."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model

LENGTH = 41
EXPERTS = {"mixtral", "qwen3-moe", "gpt-oss"}  # torch computes fused experts: docs/verification.md


def load(path: Path, dtype: str) -> Runner:
    spec = ModelSpec(
        name="m", path=str(path), device="cpu", slots=4, max_length=128, prefill_chunk=64, dtype=dtype, threads=1
    )
    return load_runner(spec)


def texts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(LENGTH)] for _ in range(3)]


def check(runner: Runner, vocab_size: int) -> None:
    text, *others = texts(vocab_size)
    whole = runner.logits([RowInput(0, 0, text)])
    assert whole.dtype == torch.float32
    assert_same(torch.cat([runner.logits([RowInput(1, i, [token])]) for i, token in enumerate(text)]), whole)
    for width in (3, 17):
        starts = range(0, LENGTH, width)
        assert_same(torch.cat([runner.logits([RowInput(1, i, text[i : i + width])]) for i in starts]), whole)
    beside = [RowInput(2, 0, others[0]), RowInput(1, 0, text), RowInput(3, 0, others[1][:5])]
    assert_same(runner.logits(beside)[LENGTH : 2 * LENGTH], whole)
    assert_same(as_tree(runner, text, start=30), whole[30:34])


def as_tree(runner: Runner, text: list[int], start: int) -> Tensor:
    """Return the logits after four tokens of the text from `start` on, which have siblings that are not text."""
    tokens = [9, text[start], 8, text[start + 1], text[start + 2], 7, text[start + 3]]
    paths = [[0], [1], [1, 2], [1, 3], [1, 3, 4], [1, 3, 5], [1, 3, 4, 6]]
    runner.logits([RowInput(2, 0, text[:start])])
    columns = [[start + node for node in path] for path in paths]
    return runner.logits([RowInput(2, start, tokens, trunk=start, paths=columns)])[[1, 3, 4, 6]]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected), f"differs by up to {(actual - expected).abs().max()}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - EXPERTS))
def test_a_familys_logits_do_not_depend_on_the_batch(family: str, dtype: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    check(load(tmp_path, dtype), VOCAB)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_the_bundled_models_logits_do_not_depend_on_the_batch(name: str) -> None:
    check(load(Path("models") / name, "bfloat16"), 2048)
