"""Quantised checkpoints of other tools: what is stored is what is computed."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig

from decoding.errors import ConfigError
from engine.layers.quantized_experts import QuantizedExperts, expert_matrices
from engine.layers.quantized_linear import QuantizedLinear
from engine.loading.checkpoint import ModelSpec, load_config, load_model
from engine.loading.quantized_checkpoint import open_checkpoint
from engine.loading.quantized_formats import quantized_reader
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from tests.support.quantized_files import KINDS, Kind, float8, gptq, save_quantized

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
LLAMA, MIXTRAL = LlamaConfig(**SHAPE), MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 33, 9, 32]])


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(folder), "device": "cpu", "dtype": "float32", **options})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@torch.no_grad()
def test_a_layer_holds_the_numbers_that_are_stored(kind: Kind, tmp_path: Path) -> None:
    expected = save_quantized(LLAMA, kind, tmp_path)
    model = load_model(spec(tmp_path))
    for name, layer in expected.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            loaded = model.get_submodule(name)
            assert isinstance(loaded, QuantizedLinear)
            torch.testing.assert_close(loaded.quantized.dequantized(), layer.weight, rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@torch.no_grad()
def test_experts_hold_the_numbers_that_are_stored(kind: Kind, tmp_path: Path) -> None:
    """Unless each has another order of inputs: then they become plain weights."""
    expected = save_quantized(MIXTRAL, kind, tmp_path)
    model = load_model(spec(tmp_path))
    for name, experts in expected.named_modules():
        for matrix in expert_matrices(experts):
            loaded: Any = model.get_submodule(name)
            is_plain = kind.settings.get("desc_act", False)
            assert isinstance(loaded, QuantizedExperts) != is_plain
            weight = getattr(loaded, matrix) if is_plain else loaded.quantized(matrix).dequantized()
            torch.testing.assert_close(weight, experts.get_parameter(matrix), rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    """FP8 numbers [E, out, in] with a scale for each block."""
    expected = save_quantized(MIXTRAL, float8(block=32), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, (matrix, names), (part, end) in product(
        range(2), (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))), (("weight", ""), ("weight_scale_inv",) * 2)
    ):
        stored = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{{}}.{part}"
        rows = [torch.cat([tensors.pop(stored.format(expert, name)) for name in names]) for expert in range(4)]
        suffix = end.removeprefix("weight")
        tensors[f"model.layers.{layer}.mlp.experts.{matrix}{suffix}"] = torch.stack(rows)
    save_file(tensors, tmp_path / "model.safetensors")
    model, plain = load_model(spec(tmp_path)), load_model(spec(tmp_path, unpacked=True))
    assert sum(isinstance(module, QuantizedExperts) for module in model.modules()) == 2
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_mxfp4_is_what_transformers_reads(tmp_path: Path) -> None:
    """It unpacks GPT-OSS where its own kernels don't run; as published, a byte's lower half is the first number."""
    config = GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    loader: Any = AutoModelForCausalLM
    loader.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, rows = tensors.pop(name).shape
        shape = experts, rows, size // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}
    config.save_pretrained(tmp_path)
    expected = loader.from_pretrained(tmp_path, dtype=torch.float32)
    model, plain = load_model(spec(tmp_path)), load_model(spec(tmp_path, unpacked=True))
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(plain.get_parameter(name), weight, rtol=0, atol=0)
        if name.endswith(("gate_up_proj", "down_proj")):
            path, _, matrix = name.rpartition(".")
            loaded: Any = model.get_submodule(path)
            torch.testing.assert_close(loaded.quantized(matrix).dequantized().mT, weight, rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@torch.no_grad()
def test_a_runner_computes_the_text_of_the_plain_weights(kind: Kind, tmp_path: Path) -> None:
    """A token's bits are the same alone and beside another row."""
    expected = save_quantized(LLAMA, kind, tmp_path)
    text: Tensor = expected.generate(IDS, max_new_tokens=30, do_sample=False)[0]  # type: ignore[operator]
    runner = load_runner(spec(tmp_path, slots=2, max_length=64))
    tokens = text.tolist()
    alone = runner.logits([RowInput(0, 0, tokens[:-1])]).clone()
    assert alone[len(IDS[0]) - 1 :].argmax(dim=-1).tolist() == tokens[len(IDS[0]) :]
    together = runner.logits([RowInput(1, 0, tokens[:5]), RowInput(0, 0, tokens[:-1])])[5:]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def _config(settings: dict[str, Any]) -> LlamaConfig:
    config = LlamaConfig(**SHAPE)
    config.quantization_config = settings
    return config


def _read(settings: dict[str, Any], parts: dict[str, Tensor], folder: Path) -> Tensor:
    save_file(parts, folder / "parts.safetensors")
    read = quantized_reader(_config(settings))
    assert read is not None
    with safe_open(folder / "parts.safetensors", framework="pt") as opened:
        stored = read({name: opened.get_slice(name) for name in parts})
        assert stored is not None
        return stored.read().dequantized()


def test_words_are_read_as_published(tmp_path: Path) -> None:
    """By hand: a word's lowest bits are the first code in GPTQ; AWQ's places are columns 0, 2, 4, 6, 1, 3, 5, 7."""
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    words, zeros = torch.tensor([[0x76543210]], dtype=torch.int32), torch.tensor([[0x22222222]], dtype=torch.int32)
    columns = {"qweight": words.repeat(1, 8), "qzeros": zeros, "scales": scales, "g_idx": torch.zeros(8).int()}
    first = _read({"quant_method": "gptq", "bits": 4}, columns, tmp_path)
    assert first.tolist() == [[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]] * 8  # the zero is 2 + 1
    second = _read({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, columns, tmp_path)
    assert second.tolist() == [[-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]] * 8
    rows = {"qweight": torch.tensor([[0x75316420]] * 8, dtype=torch.int32), "qzeros": zeros, "scales": scales}
    awq = _read({"quant_method": "awq", "bits": 4, "version": "gemm"}, rows, tmp_path)
    assert awq.T.tolist() == [[-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]] * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq, which can't be read; GPTQ, AWQ, .* and GGUF can"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quantised by torchao"),
        ({"quant_method": "exl2", "bits": 4}, "quantised by exl2"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights have 3 bits; only 4 and 8 can be read"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "laid out as marlin, .* save them as gptq",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed as nvfp4-pack-quantized; only .*pack-quantized.* can be read",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "laid out as gemv_fast, .* save them as gemm"),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    """No weights are needed for that."""
    _write_config(tmp_path, settings)
    with pytest.raises(ConfigError, match=rf"models\.m\.path: .* can't be served: its .*{message}"):
        load_config(spec(tmp_path))


def _write_config(folder: Path, settings: dict[str, Any]) -> None:
    """Write a configuration without weights."""
    _config(settings).save_pretrained(folder)


def test_layers_of_other_bits_are_refused_by_their_size(tmp_path: Path) -> None:
    kind = gptq(4, symmetric=True)
    save_quantized(LLAMA, kind, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.qweight"
    weights[name] = weights[name][: len(weights[name]) // 2].contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="GPTQ weights have 2 bits"):
        load_model(spec(tmp_path))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("options", [{"unpacked": True}, {"adapter": "it"}])
@torch.no_grad()
def test_weights_become_plain_where_they_will_change(options: dict[str, Any], tmp_path: Path) -> None:
    expected = save_quantized(LLAMA, gptq(4, symmetric=True), tmp_path)
    if "adapter" in options:
        options = {"adapter": str(tmp_path / "adapter")}
        adapted: Any = get_peft_model(expected, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        adapted.save_pretrained(tmp_path / "adapter")
        expected = adapted.merge_and_unload()
    model = load_model(spec(tmp_path, **options))
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert getattr(model.config, "quantization_config", None) is None
    torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_device_reads_its_part_of_a_plain_weight(tmp_path: Path) -> None:
    """As transformers asks for it where it splits layers."""
    expected = save_quantized(LLAMA, KINDS[1], tmp_path)
    read = quantized_reader(load_config(spec(tmp_path)))
    assert read is not None
    stored = open_checkpoint(str(tmp_path), None, read, expected, torch.float32, keeps_integers=False)
    name = "model.layers.1.mlp.down_proj.weight"
    weight, plain = expected.state_dict()[name], stored.tensors[name]
    assert plain.get_shape() == list(weight.shape)
    torch.testing.assert_close(plain[16:32, 48:], weight[16:32, 48:], rtol=0, atol=0)


@torch.no_grad()
def test_a_checkpoint_may_be_in_several_files_and_in_float16(tmp_path: Path) -> None:
    expected = save_quantized(LLAMA, gptq(4, symmetric=False, ordered=False), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: weights[name] for name in where if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    runner = load_runner(spec(tmp_path, dtype="float16", slots=1, max_length=64))
    logits = runner.logits([RowInput(0, 0, IDS[0].tolist())])
    assert runner.model.dtype == torch.float16
    torch.testing.assert_close(logits, expected(IDS).logits[0], rtol=0, atol=0.02)


SCHEMES: tuple[dict[str, Any], ...] = (
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    {"num_bits": 8, "strategy": "channel", "symmetric": False},
    {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_compressed_tensors_writes_is_read(scheme: dict[str, Any], tmp_path: Path) -> None:
    """Where it is installed."""
    tool: Any = pytest.importorskip("compressed_tensors")
    args = tool.quantization.QuantizationArgs(**scheme)
    group = tool.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    name = "pack-quantized" if args.type == "int" else "float-quantized"
    compressor = tool.compressors.BaseCompressor.get_value_from_registry(name)
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    shape = {"group": (96, 2), "channel": (96, 1), "block": (3, 2)}[scheme["strategy"]]
    state = {"weight": weight, "weight_scale": (torch.rand(shape) * 0.2 + 0.1).bfloat16().float()}
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(-5, 5, shape, dtype=torch.int8)
    written = compressor.compress(state, group)
    groups = {"group_0": {"weights": scheme}}
    settings = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}
    result = _read(settings, {part: value.contiguous() for part, value in written.items()}, tmp_path)
    torch.testing.assert_close(result, compressor.decompress(written, group)["weight"], rtol=0, atol=0)
