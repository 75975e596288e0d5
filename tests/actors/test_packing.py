"""Packed linear layers give the same result as torch's own."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from actors.faster_layers import use_faster_layers
from actors.native.gated_mlp import GatedMLP
from actors.native.library import library
from actors.native.norm import TorchRMSNorm
from actors.packing import JoinedLinear, PackedLinear
from actors.row_input import RowInput
from actors.runner import Runner
from tests.support.models import CONFIGS, tiny_model


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_packed_layer_equals_the_layer(dtype: torch.dtype, tolerance: float, bias: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    linear = nn.Linear(48, 96, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_(std=0.2, generator=generator)
    x = torch.randn(1, tokens, 48, generator=generator).to(dtype)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x), atol=tolerance, rtol=tolerance)


def test_what_stands_for_layers_on_a_gpu_computes_the_same() -> None:
    """Tried here on the CPU."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 5, 48, generator=generator)
    parts = [nn.Linear(48, size).requires_grad_(False) for size in (32, 16, 16)]
    joined = JoinedLinear(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
    torch.testing.assert_close(joined(x), torch.cat([part(x) for part in parts], dim=-1))
    norm = LlamaRMSNorm(48, eps=1e-5)
    torch.testing.assert_close(TorchRMSNorm(norm.weight, 1e-5)(x), norm(x))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_packed_model_gives_the_same_logits(family: str) -> None:
    rows = [RowInput(0, 0, [3, 1, 4, 1, 5]), RowInput(2, 0, [9, 2])]
    expected = Runner(tiny_model(family), slots=3, max_length=16, max_query=8).logits(rows)
    model = tiny_model(family)
    use_faster_layers(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    native = library() is not None and family in ("llama", "llama-gqa", "qwen3", "mistral", "mistral-window")
    assert any(isinstance(module, GatedMLP) for module in model.modules()) == native
    assert any("forward" in vars(module) for module in model.modules()) >= native  # which rotate natively
    found = Runner(model, slots=3, max_length=16, max_query=8).logits(rows)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=5e-6)
