"""New weights replace old ones, under packed layers, too."""

import gc
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.errors import ConfigError
from deployments.configuration.paths import ROOT
from engine.loading.checkpoint import ModelSpec, load_model, save_rounded
from engine.loading.new_weights import (
    ReplaceableWeights,
    check_weights,
    copy_weights,
    digest_of,
    named_tensors,
    publish_weights,
)
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.gguf_files import interleave, write_gguf
from tests.support.models import tiny_model
from tests.support.process_memory import resident_bytes
from tests.support.trimmed import copied, save_trimmed

PROMPT = list(range(1, 24))
WEIGHT = "model.layers.0.mlp.up_proj.weight"


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


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"quantization": "int4"}, {"adapters_at_run_time": 2}])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-moe", "gpt-oss", "gemma3", "minicpm3"])
def test_so_do_models_with_other_layers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        perturbed(family, seed).save_pretrained(tmp_path / name)
    old, new = (replace(spec(tmp_path / name, "float32"), **changes) for name in ("old", "new"))
    runner, expected = load_runner(old), load_runner(new)
    before = logits(runner)
    check_weights(old, new.path)
    ReplaceableWeights(runner, old).load(new.path, digest_of(new.path))
    assert torch.equal(logits(runner), logits(expected))
    weights = ReplaceableWeights(runner, old)
    weights.drop()
    weights.load("", "")
    assert torch.equal(logits(runner), before)


def perturbed(family: str, seed: int) -> PreTrainedModel:
    model, generator = copied(tiny_model(family)), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def test_what_does_not_fit_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    model, present = tiny_model("llama-gqa"), spec(tmp_path / "present", "auto")
    model.save_pretrained(tmp_path / "present")
    (tmp_path / "present" / "tokenizer.json").write_text('{"model": 1}')
    runner = load_runner(present)
    before = {name: tensor.clone() for name, tensor in named_tensors(runner.model)}

    def refusal(name: str, *changed: Tensor) -> str:
        state = {key: value for key, value in model.state_dict().items() if key != WEIGHT}
        model.save_pretrained(tmp_path / name, state_dict=state | dict(zip([WEIGHT], changed, strict=False)))
        with pytest.raises(ConfigError) as caught:
            check_weights(present, str(tmp_path / name))
        return str(caught.value)

    assert f"lacks 1 weights: {WEIGHT}" in refusal("lacking")
    assert f"{WEIGHT} is [48, 33], not [48, 32]" in refusal("wide", torch.zeros(48, 33))
    for other, reason in (
        (tiny_model("llama"), "num_key_value_heads is 4, not 2"),
        (tiny_model("llama-gqa", rms_norm_eps=0.5), "rms_norm_eps is 0.5, not 1e-06"),
        (deepcopy(model).bfloat16(), "dtype is"),
    ):
        other.save_pretrained(tmp_path / "other")
        with pytest.raises(ConfigError, match=reason):
            check_weights(present, str(tmp_path / "other"))
    model.save_pretrained(tmp_path / "same")
    check_weights(present, str(tmp_path / "same"))
    (tmp_path / "same" / "tokenizer.json").write_text('{"model": 2}')
    with pytest.raises(ConfigError, match=r"has another tokenizer\.json"):
        check_weights(present, str(tmp_path / "same"))
    with pytest.raises(ConfigError, match="has changed since"):
        ReplaceableWeights(runner, present).load(str(tmp_path / "same"), "0badc0de")
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(runner.model))


def test_a_gguf_file_is_replaced_by_one_with_the_same_types(tmp_path: Path) -> None:
    source = ROOT / "models" / "drafter"

    def write(name: str, seed: int, **kinds: gguf.GGMLQuantizationType) -> ModelSpec:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        generator = torch.Generator().manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(source)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        quantized = {f"{end}.weight": kind for end, kind in kinds.items()}
        write_gguf(tmp_path / name / "m.gguf", model, "llama", interleave, {}, quantized=quantized)
        return spec(tmp_path / name / "m.gguf", "float32")

    types = gguf.GGMLQuantizationType
    old, new = (write(name, seed, ffn_up=types.Q4_1) for seed, name in enumerate(("old", "new")))
    runner = load_runner(old)
    check_weights(old, new.path)
    ReplaceableWeights(runner, old).load(new.path, digest_of(new.path))
    assert torch.equal(logits(runner), logits(load_runner(new)))
    other = write("other", 2, ffn_up=types.Q8_0)
    for path, reason in (
        (other.path, "stores model.layers.0.mlp.up_proj in another format"),
        (str(source), "is no .gguf file, but 'm' was loaded from one"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_weights(old, path)


def test_a_dropped_model_takes_no_memory(tmp_path: Path) -> None:
    """The weights are 25 MB. What else the process holds may vary a little."""
    tiny_model("llama", hidden_size=256, intermediate_size=4096, num_hidden_layers=2).save_pretrained(tmp_path)
    runner = load_runner(spec(tmp_path, "float32"))
    runner.logits([RowInput(slot=0, start=0, tokens=PROMPT)])
    runner.cache.clear_all()
    before, weights = resident_bytes(), ReplaceableWeights(runner, spec(tmp_path, "float32"))
    held = sum(tensor.nbytes for _, tensor in named_tensors(runner.model))
    weights.drop()
    assert before - resident_bytes() > 0.8 * held
    weights.load("", "")
    assert torch.equal(logits(runner), logits(load_runner(spec(tmp_path, "float32"))))


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
