"""The C++ part: where it can't be used, torch does the same."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from actors.native.library import library
from actors.native.norm import NativeRMSNorm, replace_norms
from actors.packing import OneOfSeveral, pack_linears


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
    """One norm that is like Llama's, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = LlamaRMSNorm(32)
        self.unusual = OneMoreRMSNorm(32)


class OneMoreRMSNorm(LlamaRMSNorm):
    """As Gemma's, whose weights are relative to one."""

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
    assert kinds == [NativeRMSNorm, OneMoreRMSNorm]
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
    assert isinstance(model.gate_proj, OneOfSeveral)
    for x, (up, gate) in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), (up, gate))
