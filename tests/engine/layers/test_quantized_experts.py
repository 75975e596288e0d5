"""Experts with weights of 4 or 8 bits."""

from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine.kernels.quantized_weight import rounded_to_nearest
from engine.layers.faster_layers import use_faster_parts
from engine.layers.quantized_experts import NativeExpertProduct, QuantizedExperts, expert_matrices
from tests.support.quantized import LAYOUTS, Layout, experts_of

DTYPES = (torch.float32, torch.bfloat16)
COUNT, CHOSEN, TOKENS = 5, 2, 40


def choose(tokens: int = TOKENS) -> torch.Tensor:
    """Return CHOSEN experts for each token; nobody chooses the last one."""
    noise = torch.rand(tokens, COUNT - 1, generator=torch.Generator().manual_seed(3))
    return noise.argsort(dim=-1)[:, :CHOSEN].contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_row_is_multiplied_with_its_experts_weight(layout: Layout, dtype: torch.dtype) -> None:
    """Summed in float32 and rounded once; a token's bits do not depend on its batch."""
    weight = experts_of(layout, COUNT)
    bias = torch.randn(COUNT, layout.rows, generator=torch.Generator().manual_seed(2))
    x = torch.randn(TOKENS, layout.size, generator=torch.Generator().manual_seed(1)).to(dtype)
    chosen = choose()
    product = NativeExpertProduct(weight, bias)
    result = product(x, chosen.flatten())
    plain = weight.dequantized().double()
    for row, expert in enumerate(chosen.flatten().tolist()):
        expected = x[row // CHOSEN].double() @ plain[expert].T + bias[expert]
        rounding = 3e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(result[row].double(), expected, rtol=0, atol=rounding * float(expected.abs().max()))
    for tokens in (1, 2, 7, 33):
        assert torch.equal(product(x[:tokens], chosen[:tokens].flatten()), result[: tokens * CHOSEN])


def make(kind: type, config: Any) -> Any:
    """Return random experts."""
    config._experts_implementation = "eager"
    experts = kind(config)
    generator = torch.Generator().manual_seed(4)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return experts.requires_grad_(False)


SHAPE: dict[str, Any] = {"hidden_size": 64, "num_experts_per_tok": CHOSEN, "num_local_experts": COUNT}
KINDS = {
    "gated": (MixtralExperts, MixtralConfig(**SHAPE, intermediate_size=96)),
    "transposed, alternating, with biases": (GptOssExperts, GptOssConfig(**SHAPE, intermediate_size=96)),
    "without gates": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=64, moe_intermediate_size=96, n_routed_experts=COUNT, mlp_hidden_act="relu2"),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_experts_compute_what_transformers_does_with_unpacked_weights(name: str, dtype: torch.dtype) -> None:
    experts = make(*KINDS[name])
    weights = {}
    for matrix in expert_matrices(experts):
        plain = experts.get_parameter(matrix)
        weights[matrix] = rounded_to_nearest(plain.mT if experts.is_transposed else plain, 4)
        unpacked = weights[matrix].dequantized()
        plain.copy_(unpacked.mT if experts.is_transposed else unpacked)
    generator = torch.Generator().manual_seed(5)
    x, shares = torch.randn(TOKENS, 64, generator=generator), torch.rand(TOKENS, CHOSEN, generator=generator)
    expected = experts(x, choose(), shares)
    quantized = torch.nn.Sequential(QuantizedExperts(experts.to(dtype), weights))
    layer: Any = quantized[0]
    tolerance = 1e-4 if dtype == torch.float32 else 0.03 * float(expected.std())
    torch.testing.assert_close(
        layer(x.to(dtype), choose(), shares.to(dtype)).float(), expected, rtol=tolerance, atol=tolerance
    )
    use_faster_parts(quantized, deterministic=True)
    assert all(isinstance(product, NativeExpertProduct) for product in layer.packed.values())
    assert not any(True for _ in layer.buffers())
    result = layer(x.to(dtype), choose(), shares.to(dtype))
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)
    alone = [layer(*(part[i : i + 1] for part in (x.to(dtype), choose(), shares.to(dtype)))) for i in range(TOKENS)]
    assert torch.equal(torch.cat(alone), result)
