"""Products, norms and what is between them, of fixed order: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D

from tests.support.interpreter import DEVICE

from engine.kernels.triton_elementwise import fixed_order_rms_norm, rotate, silu_gate  # isort: skip
from engine.kernels.triton_linear import fixed_order_linear  # isort: skip
from engine.layers import linear as layers  # isort: skip
from engine.layers.faster_layers import use_faster_layers  # isort: skip
from engine.layers.linear import NativeLinear  # isort: skip
from engine.layers.onednn_linear import PackedLinear  # isort: skip
from engine.layers.lora import LoraLayers  # isort: skip
from engine.model.ragged_batch import RowInput  # isort: skip
from engine.model.runner import Runner  # isort: skip
from tests.support.models import tiny_model  # isort: skip

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, 17, 70, 130])
def test_product(dtype: torch.dtype, tokens: int) -> None:
    """Neither features nor inputs fill their blocks."""
    x, weight, bias = random(tokens, 200, dtype=dtype), random(72, 200, dtype=dtype, seed=1), random(72, seed=2)
    expected = linear(x.float(), weight.float(), bias)
    actual = fixed_order_linear(x, weight, bias.to(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


def test_product_of_each_head() -> None:
    x, weight = random(5, 3, 200), random(3, 72, 200, seed=1)
    actual = fixed_order_linear(x, weight)
    for head in range(3):
        assert torch.equal(actual[:, head], fixed_order_linear(x[:, head], weight[head]))


def test_product_leaves_the_output_layer_unrounded() -> None:
    x, weight = random(2, 3, 64, dtype=torch.bfloat16), random(40, 64, dtype=torch.bfloat16, seed=1)
    actual = fixed_order_linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(actual, linear(x.float(), weight.float()), rtol=1e-5, atol=1e-4)


def test_product_of_a_view() -> None:
    x, weight = random(9, 128), random(40, 64, seed=1)
    for view in (x[:, 64:], random(64, 70).T, random(1, 64).expand(70, 64)):
        torch.testing.assert_close(fixed_order_linear(view, weight), linear(view, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 200, dtype=dtype), random(200, dtype=dtype, seed=1)
    expected = rms_norm(x.float(), (200,), weight.float(), 1e-6)
    actual = fixed_order_rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def new_runner(family: str, *, deterministic: bool) -> Runner:
    model = tiny_model(family, num_hidden_layers=2)
    nn.Module.to(model, DEVICE, torch.bfloat16)
    use_faster_layers(model, deterministic=deterministic)
    return Runner(model, slots=4, max_length=40, max_query=16)


@pytest.fixture
def _layers_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_FIXED_ORDER_DEVICE", DEVICE)


@pytest.mark.usefixtures("_layers_on_this_device")
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt2"])
def test_models_compute_the_same_with_layers_of_fixed_order(family: str) -> None:
    rows = [RowInput(0, 0, [3, 1, 4, 1, 5]), RowInput(2, 0, [9, 2])]
    plain, fixed = (new_runner(family, deterministic=deterministic) for deterministic in (False, True))
    assert plain.trees_are_exact
    assert not fixed.trees_are_exact
    kinds = {type(module) for module in fixed.model.modules()}
    assert not kinds & {nn.Linear, Conv1D, LlamaRMSNorm, Gemma3RMSNorm, PackedLinear, NativeLinear}
    torch.testing.assert_close(fixed.logits(rows), plain.logits(rows), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("_layers_on_this_device")
def test_a_model_gives_a_token_the_same_bits_in_any_company() -> None:
    runner = new_runner("llama-gqa", deterministic=True)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    chunks = [RowInput(1, start, text[start:end]) for start, end in ((0, 1), (1, 17), (17, 20))]
    alone = torch.cat([runner.logits([chunk]).clone() for chunk in chunks])  # the next call may overwrite logits
    company = [RowInput(0, 0, [7] * 10), RowInput(2, 0, text), RowInput(3, 0, [8] * 7)]
    assert torch.equal(runner.logits(company)[10:30], alone)


@pytest.mark.usefixtures("_layers_on_this_device")
def test_adapters_have_the_same_bits_in_any_company_and_any_slot() -> None:
    model = tiny_model("llama-gqa", num_hidden_layers=2)
    nn.Module.to(model, DEVICE, torch.bfloat16)
    lora = LoraLayers(model, slots=2, rank=4)
    use_faster_layers(model, lora=lora)
    runner = Runner(model, slots=4, max_length=32, max_query=16, lora=lora)
    pairs = {"model.layers.1.self_attn.k_proj": (random(3, 32, seed=3), random(16, 3, seed=4))}
    lora.check(pairs)
    lora.write(2, "v", pairs)
    text = [3, 1, 4, 1, 5]
    company = [RowInput(0, 0, [7] * 10), RowInput(1, 0, text, adapter=2), RowInput(2, 0, text, adapter=1)]
    _, beside, without = runner.logits(company).clone().split([10, 5, 5])
    alone = [runner.logits([RowInput(3, i, [token], adapter=2)]).clone() for i, token in enumerate(text)]
    assert torch.equal(beside, torch.cat(alone))
    assert torch.equal(without, new_runner("llama-gqa", deterministic=True).logits([RowInput(0, 0, text)]))
    assert not torch.equal(beside, without)
    lora.write(1, "v", pairs)
    assert torch.equal(runner.logits([RowInput(0, 0, text, adapter=1)]), beside)


# The interpreter does not round to bfloat16, it truncates.
ROUNDED = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rotation_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    """Queries and keys are slices of one product, as in a layer."""
    both, angles = random(1, 5, 6, 48, dtype=dtype), random(2, 1, 5, 48, dtype=dtype, seed=1)
    query, key = both.transpose(1, 2).split([4, 2], dim=1)
    for actual, expected in zip(rotate(query, key, *angles), apply_rotary_pos_emb(query, key, *angles), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("size", [40, 1500])
def test_gate(dtype: torch.dtype, size: int) -> None:
    both = (random(6, 2 * size + 8, dtype=dtype) * 4)[:, : 2 * size]
    gate, up = both.chunk(2, dim=-1)
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-5)  # two steps of the dtype
    torch.testing.assert_close(silu_gate(both), silu(gate) * up, rtol=tolerance, atol=1e-5)
