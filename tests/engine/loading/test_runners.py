"""New weights replace old ones, under packed layers, too."""

import gc
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model, save_rounded
from engine.loading.runners import copy_weights, load_runner, publish_weights
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model
from tests.support.trimmed import copied, save_trimmed

PROMPT = list(range(1, 24))


def logits(runner: Runner) -> Tensor:
    """Return logits of a prompt and of a step that runs as a trace."""
    prompt = runner.logits([RowInput(slot=0, start=0, tokens=PROMPT)])
    step = runner.logits([RowInput(slot=0, start=len(PROMPT), tokens=[7, 8])])
    runner.cache.clear_all()
    return torch.cat([prompt, step])


def spec(folder: Path, dtype: str) -> ModelSpec:
    return ModelSpec(name="m", path=str(folder), dtype=dtype, device="cpu", slots=2, max_length=64, threads=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [None, [token for token in range(64) if token % 3]], ids=["all", "trimmed"])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gpt2"])
def test_a_running_model_computes_what_one_loaded_anew_does(
    family: str, kept: list[int] | None, dtype: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("old", "new"):
        model = copied(tiny_model(family))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        if kept is None:
            model.save_pretrained(tmp_path / name)
        else:
            save_trimmed(model, kept, tmp_path / name)
    runner, expected = (load_runner(spec(tmp_path / name, dtype)) for name in ("old", "new"))
    before = logits(runner)
    publish_weights(runner, spec(tmp_path / "old", dtype), str(tmp_path / "new"))
    assert torch.equal(logits(runner), logits(expected))
    assert not torch.equal(logits(runner), before)


def test_prefixes_that_the_old_weights_computed_are_computed_anew(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    runner = load_runner(spec(tmp_path, "float32"))
    slot, _ = runner.cache.take()
    runner.logits([RowInput(slot=slot, start=0, tokens=PROMPT)])
    runner.cache.note_text(slot, [b"prefix"])
    runner.cache.give_back(slot)
    assert runner.cache.allocator.find(b"prefix") is not None
    publish_weights(runner, spec(tmp_path, "float32"), str(tmp_path))
    assert runner.cache.allocator.find(b"prefix") is None


def test_another_model_is_refused_and_changes_nothing() -> None:
    model = deepcopy(tiny_model("llama"))
    weights = deepcopy(model.state_dict())
    for other in ("llama-gqa", "gpt2"):
        with pytest.raises(ValueError, match="new weight"):
            copy_weights(model, tiny_model(other))
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_folder_that_is_gone_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    runner = load_runner(spec(tmp_path, "float32"))
    with pytest.raises(ConfigError):
        publish_weights(runner, spec(tmp_path, "float32"), str(tmp_path / "gone"))


def test_packed_weights_do_not_keep_their_file_in_memory(tmp_path: Path) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "int8"
    tiny_model("llama-gqa").save_pretrained(plain)
    save_rounded(load_model(replace(spec(plain, "float32"), quantization="int8")), str(plain), folder)
    runner = load_runner(spec(folder, "float32"))
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert logits(runner).isfinite().all()
