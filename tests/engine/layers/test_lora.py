"""Layers with adapters give peft's logits, and bits that depend on nothing but the token and its adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.kernels.native import library
from engine.layers.faster_layers import use_faster_layers
from engine.layers.linear import NativeLinear
from engine.layers.lora import LoraLayers
from engine.loading.lora import read_lora
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES = {
    "llama-gqa": "all-linear",
    "gemma2": "all-linear",
    "qwen3": "all-linear",
    "opt": "all-linear",
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "qwen3-moe": ATTENTION,
}


def in_dtype(family: str, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = tiny_model(family)
    converted: PreTrainedModel = model.to(dtype)
    return converted


def runner(family: str, adapters: list[Path], *, dtype: torch.dtype = torch.float32, slots: int = 3) -> Runner:
    """Return a runner with adapters in slots 1, 2, …"""
    model = in_dtype(family, dtype)
    lora = LoraLayers(model, slots=slots, rank=8)
    use_faster_layers(model, lora=lora)
    made = Runner(model, slots=4, max_length=64, max_query=16, lora=lora)
    for slot, folder in enumerate(adapters, 1):
        put(made, slot, folder)
    return made


def put(made: Runner, slot: int, folder: Path) -> None:
    weights = read_lora(str(folder))
    assert made.lora is not None
    made.lora.check(weights.pairs)
    made.lora.write(slot, weights.version, weights.pairs)


def plain(family: str, dtype: torch.dtype) -> Tensor:
    """Return the logits of a target without adapters."""
    model = in_dtype(family, dtype)
    use_faster_layers(model)
    return Runner(model, slots=4, max_length=64, max_query=16).logits([RowInput(1, 0, TEXT)])


@torch.no_grad()
def peft_logits(model: torch.nn.Module) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_the_logits_of_its_own_adapter(family: str, tmp_path: Path) -> None:
    a, b = (
        peft_logits(save_adapter(tmp_path / str(seed), tiny_model(family), seed, target_modules=FAMILIES[family]))
        for seed in (1, 2)
    )
    made = runner(family, [tmp_path / "1", tmp_path / "2"])
    rows = [RowInput(0, 0, TEXT, adapter=1), RowInput(1, 0, TEXT), RowInput(2, 0, TEXT, adapter=2)]
    first, without, second = made.logits(rows).split(len(TEXT))
    torch.testing.assert_close(first, a, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second, b, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(without, plain(family, torch.float32))  # experts' bits depend on the batch
    assert (first - without).abs().max() > 0.1


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"down_proj": 16}},
        {"target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [1]},
    ],
    ids=lambda config: next(iter(config)),
)
def test_ranks_and_scales_are_pefts(config: dict[str, object], tmp_path: Path) -> None:
    expected = peft_logits(save_adapter(tmp_path, tiny_model("llama-gqa"), 3, **config))
    logits = runner("llama-gqa", [tmp_path]).logits([RowInput(0, 0, TEXT, adapter=1)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["as it is", "traced", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_the_token_and_its_adapter_alone(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        save_adapter(tmp_path / str(seed), tiny_model("llama-gqa"), seed)
    made = runner("llama-gqa", [tmp_path / "1", tmp_path / "2"], dtype=dtype)
    made.logits([RowInput(0, 0, [0])])
    made.cache.clear_all()
    if how == "traced":
        made.use_trace()
    elif how == "graphs":
        made.use_graphs(capture=lambda run: run)
    alone = torch.cat([made.logits([RowInput(3, i, [token], adapter=1)]).clone() for i, token in enumerate(TEXT)])
    rows = [RowInput(0, 0, TEXT, adapter=2), RowInput(1, 0, TEXT), RowInput(2, 0, TEXT, adapter=1)]
    _, without, beside = made.logits(rows).split(len(TEXT))
    assert torch.equal(beside, alone)
    assert torch.equal(without, plain("llama-gqa", dtype))
    put(made, 3, tmp_path / "1")
    assert torch.equal(made.logits([RowInput(0, 0, TEXT, adapter=3)]), alone)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_slots_of_any_rank_are_alike() -> None:
    """Products of bfloat16 may add 32 inputs at once, which must not be of two slots. Here they are not rounded."""
    rank = LoraLayers(in_dtype("llama-gqa", torch.bfloat16), slots=3, rank=40).rank
    generator = torch.Generator().manual_seed(1)
    up, hidden = torch.zeros(500, rank), torch.zeros(8, rank)
    up[:, :40], hidden[:, :40] = (torch.randn(count, 40, generator=generator) for count in (500, 8))
    layer = NativeLinear(up.repeat(1, 3).bfloat16(), None, out_dtype=torch.float32)
    empty = torch.zeros_like(hidden)
    first, *others = (
        layer(torch.cat([empty] * slot + [hidden] + [empty] * (2 - slot), 1).bfloat16()) for slot in range(3)
    )
    assert all(torch.equal(result, first) for result in others)


def test_a_slot_keeps_nothing_of_what_was_there(tmp_path: Path) -> None:
    expected = peft_logits(save_adapter(tmp_path / "b", tiny_model("llama-gqa"), 2, target_modules=["q_proj"], r=2))
    save_adapter(tmp_path / "a", tiny_model("llama-gqa"), 1)
    made = runner("llama-gqa", [tmp_path / "a"])
    made.logits([RowInput(0, 0, TEXT, adapter=1)])
    put(made, 1, tmp_path / "b")
    torch.testing.assert_close(made.logits([RowInput(0, 0, TEXT, adapter=1)]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "config", "message"),
    [
        ("llama-gqa", {}, {"r": 9}, "its rank is 9, but max_adapter_rank is 8; raise that"),
        ("llama-gqa", {"hidden_size": 64}, {}, r"is \[.*\] there, but \[.*\] in the model; it is another base's"),
        ("gpt2", {}, {"target_modules": ["c_attn"]}, "no linear layer 'transformer.h.0.attn.c_attn'.*another base's"),
        ("llama-gqa", {}, {"target_modules": ["lm_head"]}, "no linear layer 'lm_head' that takes adapters"),
    ],
)
def test_adapters_of_other_models_are_refused(
    family: str, changes: dict[str, int], config: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, tiny_model(family, **changes), 1, **config)
    with pytest.raises(ConfigError, match=message):
        runner("llama-gqa", [tmp_path])


@pytest.mark.parametrize("value", [float("nan"), 1e39])
def test_weights_that_would_spoil_other_rows_are_refused(value: float, tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny_model("llama-gqa"), 1)
    weights = read_lora(str(tmp_path))
    path, (down, up) = next(iter(weights.pairs.items()))
    lora = runner("llama-gqa", [tmp_path]).lora
    assert lora is not None
    with pytest.raises(ConfigError, match=r"has weights that are no finite numbers in torch\.float32"):
        lora.check({path: (down, up.double() + value)})
