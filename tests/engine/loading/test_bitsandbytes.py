"""Checkpoints that bitsandbytes wrote, and `quantization: nf4`: the numbers are those of bitsandbytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BitsAndBytesConfig, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import rounded
from engine.layers.quantized_experts import QuantizedExperts, expert_matrices
from engine.layers.quantized_linear import QuantizedLinear
from engine.loading.checkpoint import ModelSpec, load_config, load_model
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from tests.support.quantized_files import BITSANDBYTES, random_model, save_by_bitsandbytes

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,  # blocks of 64 begin within rows
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
LLAMA = LlamaConfig(**SHAPE)
GPT2 = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=None)
MIXTRAL = MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 33, 9, 32]])


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(folder), "device": "cpu", "dtype": "float32", **options})


def save(config: PretrainedConfig, name: str, folder: Path) -> Any:
    """Save a random model, and return it with the same weights as plain numbers."""
    random_model(config).save_pretrained(folder / "plain")
    return save_by_bitsandbytes(folder / "plain", name, folder)


@pytest.mark.parametrize("name", BITSANDBYTES)
@torch.no_grad()
def test_a_layer_holds_the_numbers_that_are_stored(name: str, tmp_path: Path) -> None:
    """LLM.int8's scales are rounded once more than where bitsandbytes unpacks them."""
    expected = save(LLAMA, name, tmp_path)
    model = load_model(spec(tmp_path))
    for path, layer in expected.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            loaded = model.get_submodule(path)
            assert isinstance(loaded, QuantizedLinear)
            rtol = 2e-7 if name == "llm-int8" else 0
            torch.testing.assert_close(loaded.quantized.dequantized(), layer.weight, rtol=rtol, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nf4-nested", "llm-int8"])
@pytest.mark.parametrize("unpacked", [False, True])
@torch.no_grad()
def test_a_layer_may_have_its_weight_transposed(name: str, unpacked: bool, tmp_path: Path) -> None:
    expected = save(GPT2, name, tmp_path)
    model = load_model(spec(tmp_path, unpacked=unpacked))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == (0 if unpacked else 8)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nf4-nested", "llm-int8"])
@torch.no_grad()
def test_a_runner_computes_the_text_of_the_plain_weights(name: str, tmp_path: Path) -> None:
    """A token's bits are the same alone and beside another row."""
    expected = save(LLAMA, name, tmp_path)
    tokens = expected.generate(IDS, max_new_tokens=30, do_sample=False)[0].tolist()
    runner = load_runner(spec(tmp_path, slots=2, max_length=64))
    alone = runner.logits([RowInput(0, 0, tokens[:-1])]).clone()
    assert alone[len(IDS[0]) - 1 :].argmax(dim=-1).tolist() == tokens[len(IDS[0]) :]
    together = runner.logits([RowInput(1, 0, tokens[:5]), RowInput(0, 0, tokens[:-1])])[5:]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize("together", [False, True])
@torch.no_grad()
def test_experts_stay_quantised(together: bool, tmp_path: Path) -> None:
    """One by one, as older versions wrote them, or as matrices [E, out, in], as bitsandbytes' `parametrize` does."""
    random_model(MIXTRAL).save_pretrained(tmp_path, save_original_format=not together)
    numbers, tensors = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in numbers.items():
        tensors[name] = weight
        if ".experts." in name:
            codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            parts = {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
            tensors |= {name: codes, **parts}
            state.shape = torch.Size([1, weight.numel()])  # as in `save_by_bitsandbytes`
            numbers[name] = functional.dequantize_4bit(codes, state).view(weight.shape)
    (tmp_path / "plain").mkdir()
    MIXTRAL.save_pretrained(tmp_path / "plain")
    save_file(numbers, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    expected = load_model(spec(tmp_path / "plain"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = MixtralConfig.from_pretrained(tmp_path / "plain")
    config.quantization_config = BitsAndBytesConfig(**BITSANDBYTES["nf4-nested"])
    config.save_pretrained(tmp_path)
    model: Any = load_model(spec(tmp_path))
    assert sum(isinstance(module, QuantizedExperts) for module in model.modules()) == 2
    for path, experts in expected.named_modules():
        for matrix in expert_matrices(experts):
            weight = model.get_submodule(path).quantized(matrix).dequantized()
            torch.testing.assert_close(weight, experts.get_parameter(matrix), rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_rounded_as_bitsandbytes_does(dtype: torch.dtype) -> None:
    """Wherever its blocks don't cross rows."""
    weight = torch.randn(96, 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0, :64] = 0
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    own = rounded(weight, "nf4")
    assert torch.equal(own.codes.flatten(), (codes >> 4 | codes << 4).flatten())
    assert torch.equal(own.scales.flatten(), state.absmax)
    state.dtype = torch.float32
    assert torch.equal(own.dequantized(), functional.dequantize_4bit(codes, state))


def test_what_is_laid_out_for_old_gpus_is_refused(tmp_path: Path) -> None:
    save(LLAMA, "llm-int8", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"LLM\.int8 weights are laid out for old GPUs; save them again"):
        load_model(spec(tmp_path))


def test_activations_are_rounded_beside_llm_int8_only(tmp_path: Path) -> None:
    for name in ("llm-int8", "nf4-stored"):
        save(LLAMA, name, tmp_path / name)
    load_model(spec(tmp_path / "llm-int8", activations="int8"))
    with pytest.raises(ConfigError, match=r"models\.m\.activations: int8 needs weights that are integers"):
        load_config(spec(tmp_path / "nf4-stored", activations="int8"))
