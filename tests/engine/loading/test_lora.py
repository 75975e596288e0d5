"""Adapters that are more than low-rank products are refused in one line that names the reason."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import Quantization
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.lora import read_lora
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(tmp_path, tiny_model("llama"), 1, target_modules=["q_proj"])
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "it is a DoRA (use_dora)"),
        ({"bias": "all"}, "it has biases (bias: all)"),
        ({"modules_to_save": ["lm_head"]}, "it needs modules_to_save, which is not supported"),
        ({"trainable_token_indices": [1]}, "it needs trainable_token_indices"),
        ({"lora_bias": True}, "it needs lora_bias"),
        ({"init_lora_weights": "pissa"}, "it began as 'pissa'"),
        ({"peft_type": "IA3"}, "is of no LoRA adapter"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, folder: Path) -> None:
    read_lora(str(folder))
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_lora(str(folder))
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["base_model.model.model.embed_tokens.lora_embedding_A", "base_model.model.lm_head.weight"]
)
def test_other_tensors_are_named(name: str, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: next(iter(tensors.values())).clone()}, file)
    with pytest.raises(ConfigError, match=f"it has the tensor '{name}'"):
        read_lora(str(folder))


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is damaged"):
        read_lora(str(folder))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"it has no adapter_model\.safetensors; save it as peft does"):
        read_lora(str(folder))
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_lora(str(folder / "nothing"))


def test_the_version_tells_contents_apart(folder: Path, tmp_path: Path) -> None:
    version = read_lora(str(folder)).version
    assert read_lora(str(folder)).version == version
    change_config(folder, lora_alpha=5)
    assert read_lora(str(folder)).version != version


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for a deprecated name
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_targets_have_adapters(quantization: Quantization, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=64, head_dim=16, intermediate_size=128)
    model.save_pretrained(tmp_path / "model")
    save_adapter(tmp_path / "adapter", model, 1)
    spec = ModelSpec(
        name="m",
        path=str(tmp_path / "model"),
        device="cpu",
        max_length=64,
        dtype="float32",
        quantization=quantization,
    )
    adapted = PeftModel.from_pretrained(load_model(spec), tmp_path / "adapter").eval()
    text = [3, 1, 4, 1, 5, 9]
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([text])).logits[0]
    runner = load_runner(replace(spec, adapters={"a": str(tmp_path / "adapter")}))
    logits = runner.logits([RowInput(0, 0, text, adapter=1)])
    without = runner.logits([RowInput(1, 0, text)])
    assert (logits - expected).norm() < 1e-4 * (without - expected).norm()
