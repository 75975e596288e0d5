"""The C++ functions compute what torch does, and torch replaces them where they can't be used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GlmConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from engine.kernels.native import library
from engine.layers.mlp import GatedMLP, NativeActivation, replace_activations, replace_mlps
from engine.layers.norm import NativeRMSNorm, replace_norms
from engine.layers.packing import GroupedLinear, pack_linears
from engine.layers.rotary import NativeRotary, replace_rotary


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "sh -c 'exit 1'"])
def test_without_a_working_compiler_there_is_no_library(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.__wrapped__() is None
    assert not list(tmp_path.glob("consort/*"))


def test_a_cache_that_cannot_be_written_costs_only_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.__wrapped__() is None


class Norms(nn.Module):
    """A norm like Llama's, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = LlamaRMSNorm(32)
        self.unusual = ResidualRMSNorm(32)


class ResidualRMSNorm(LlamaRMSNorm):
    """Adds its input, as Gemma's weights relative to one do."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states) + hidden_states
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_replaced_where_they_compute_the_same(dtype: torch.dtype) -> None:
    norms = Norms().to(dtype)
    expected, other = norms.usual, torch.randn(3, 32, dtype=torch.float64)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    replace_norms(norms)
    kinds = [type(child) for child in norms.children()]
    assert kinds == [NativeRMSNorm, ResidualRMSNorm]
    torch.testing.assert_close(norms.usual(x), expected(x), rtol=0.01, atol=1e-6)
    torch.testing.assert_close(norms.usual(other), expected(other))


class Gated(nn.Module):
    """Calls the second layer of a group first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up = self.up_proj(x)
        return up, self.gate_proj(x)


def test_layers_computed_together_may_be_called_in_any_order() -> None:
    model = Gated().requires_grad_(False)
    inputs = [torch.randn(2, 32) for _ in range(3)]
    expected = [model(x) for x in inputs]
    pack_linears(model)
    assert isinstance(model.gate_proj, GroupedLinear)
    for x, (up, gate) in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), (up, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9, 400])
def test_gated_layers_are_replaced_where_they_compute_the_same(dtype: torch.dtype, tokens: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    model = nn.ModuleDict({act: LlamaMLP(LlamaConfig(**sizes, hidden_act=act)) for act in ("silu", "gelu")})
    model.to(dtype).requires_grad_(False)
    x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(1)).to(dtype) * 5
    pack_linears(model)
    expected = model["silu"](x)
    replace_mlps(model)
    assert [type(layer) for layer in model.values()] == [GatedMLP, LlamaMLP]
    torch.testing.assert_close(model["silu"](x.clone()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu"])
def test_an_activation_gives_a_token_the_same_bits_in_every_batch(act: str, dtype: torch.dtype, threads: int) -> None:
    """torch's own differ with three threads, which begin amid rows of this size."""
    before = torch.get_num_threads()
    model = nn.ModuleList([ACT2FN[act], nn.Linear(1, 1), nn.MultiheadAttention(8, 1)])
    replace_activations(model)
    assert isinstance(model[0], NativeActivation)
    assert type(model[2]) is nn.MultiheadAttention
    both = (3 * torch.randn(40, 2 * 10240, generator=torch.Generator().manual_seed(1))).to(dtype)
    x, _ = both.chunk(2, dim=-1)
    expected = ACT2FN[act](x.double()).to(dtype)
    torch.set_num_threads(threads)
    try:
        single = torch.cat([model[0](row) for row in x.split(1)])
        for count in (4, 5, 8, 20, 40):
            assert torch.equal(torch.cat([model[0](rows) for rows in x.split(count)]), single)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(single, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=2e-6)


def test_other_activations_are_left_alone() -> None:
    model = nn.ModuleList([ACT2FN["relu2"], ACT2FN["mish"], nn.Softplus(), nn.Linear(1, 1)])
    replace_activations(model)
    assert not any(isinstance(layer, NativeActivation) for layer in model)


class Limited(LlamaMLP):
    """A layer whose gates are limited to 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=7.0)
        result: torch.Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return result


class Odd(LlamaMLP):
    """A layer that returns a second value."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def test_gated_layers_that_do_more_are_left_alone() -> None:
    config = LlamaConfig(hidden_size=32, intermediate_size=64)
    model = nn.ModuleList([Limited(config), Odd(config)]).requires_grad_(False)
    pack_linears(model)
    replace_mlps(model)
    assert [type(layer) for layer in model] == [Limited, Odd]


def heads(count: int, *, tokens: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, tokens, count, 16, generator=torch.Generator().manual_seed(count)).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_rotation_is_that_of_transformers(dtype: torch.dtype, tokens: int) -> None:
    q, k = (heads(count, tokens=tokens, dtype=dtype) for count in (6, 2))
    cos, sin = (heads(count, tokens=tokens, dtype=dtype)[:, 0].contiguous() for count in (1, 3))
    rotated = NativeRotary(refuse)(q, k, cos, sin)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6)


def refuse(*given: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError


def test_other_inputs_go_to_the_models_own_rotation() -> None:
    rotary = NativeRotary(modeling_llama.apply_rotary_pos_emb)
    q, k, cos, sin = heads(4), heads(2), heads(1)[:, 0], heads(3)[:, 0]
    for given in (
        (q.double(), k.double(), cos.double(), sin.double()),
        (q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), cos, sin),
        (q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2),
        (q.bfloat16(), k.bfloat16(), cos, sin),
    ):
        torch.testing.assert_close(rotary(*given), modeling_llama.apply_rotary_pos_emb(*given))


def test_only_layers_with_this_rotation_change_and_no_module_of_transformers() -> None:
    before = [module.apply_rotary_pos_emb for module in (modeling_llama, modeling_gemma, modeling_glm)]
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    layers = nn.ModuleList(
        [
            modeling_llama.LlamaAttention(LlamaConfig(**sizes), 0),
            modeling_gemma.GemmaAttention(GemmaConfig(**sizes), 0),
            modeling_glm.GlmAttention(GlmConfig(**sizes), 0),  # rotates pairs of neighbours
        ]
    )
    replace_rotary(layers)
    assert ["forward" in vars(layer) for layer in layers] == [True, True, False]
    assert before == [module.apply_rotary_pos_emb for module in (modeling_llama, modeling_gemma, modeling_glm)]
