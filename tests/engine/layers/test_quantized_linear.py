"""Layers with weights of 4 or 8 bits on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.quantized_weight import QuantizedWeight, rounded_to_nearest
from engine.layers.faster_layers import use_faster_parts
from engine.layers.packing import GroupedLinear
from engine.layers.quantized_linear import (
    NativeQuantizedEmbedding,
    NativeQuantizedLinear,
    QuantizedEmbedding,
    QuantizedLinear,
)
from tests.support.quantized import LAYOUTS, Layout, random_weight

DTYPES = (torch.float32, torch.bfloat16)
COUNTS = 1, 2, 3, 5, 8, 11, 12, 13, 25, 100, 193  # of tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_product_is_that_of_the_unpacked_weight(layout: Layout, dtype: torch.dtype) -> None:
    """It is summed in float32 and rounded once, and a token's bits do not depend on its batch."""
    weight = random_weight(layout)
    bias = torch.randn(layout.rows, generator=torch.Generator().manual_seed(2))
    layer = NativeQuantizedLinear(weight, bias, out_dtype=torch.float32)
    x = torch.randn(200, layout.size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ weight.dequantized().double().T + bias
    result = layer(x)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
    for count in COUNTS:
        assert torch.equal(layer(x[:count]), result[:count])
    torch.testing.assert_close(NativeQuantizedLinear(weight, bias)(x), result.to(dtype), rtol=0, atol=0)


def rounded_product(x: Tensor, weight: QuantizedWeight, bias: Tensor) -> Tensor:
    """Return the product of rounded inputs in float32, [N, out]; each addition is fused with its multiplication.

    x: [N, in].
    """

    def fused(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        return (left.double() * right.double() + total.double()).float()

    groups = x.float().unflatten(1, (-1, weight.group))
    largest = groups.abs().amax(-1)
    scales = largest * torch.tensor(1 / 127)
    factors = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)
    codes = (groups * factors[..., None]).round()
    weights = (weight.unpacked_codes.double() - weight.zero).unflatten(1, (-1, weight.group))
    result = bias.expand(len(x), -1)
    for group in range(groups.shape[1]):
        products = (codes[:, group].double() @ weights[:, group].T).float()
        result = fused(products * scales[:, group, None], weight.scales[:, group], result)
        if weight.offsets is not None:
            totals = scales[:, group] * codes[:, group].sum(-1)
            result = fused(totals[:, None], weight.offsets[:, group], result)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not (layout.floats or layout.table)], ids=str)
def test_inputs_are_rounded_to_8_bits(layout: Layout, dtype: torch.dtype) -> None:
    """Sums of integers are exact and the order of the others is fixed, so the bits are the same on all processors."""
    weight = replace(random_weight(layout), rounds_inputs=True)
    bias = torch.randn(layout.rows, generator=torch.Generator().manual_seed(2))
    layer = NativeQuantizedLinear(weight, bias, out_dtype=torch.float32)
    x = torch.randn(200, layout.size, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = 0
    result = layer(x)
    assert torch.equal(result, rounded_product(x, weight, bias))
    for count in COUNTS:
        assert torch.equal(layer(x[:count]), result[:count])
    expected = x.float() @ weight.dequantized().T + bias
    assert (result - expected).norm() < 0.01 * expected.norm()
    for value in (torch.nan, torch.inf):
        x[5, 7] = value
        assert layer(x)[5].isnan().all()


def test_the_largest_codes_do_not_overflow() -> None:
    codes, scales = torch.full((40, 1024), 255, dtype=torch.uint8), torch.ones(40, 1)
    weight = QuantizedWeight(codes=codes, scales=scales, offsets=torch.zeros(40, 1), bits=8, rounds_inputs=True)
    x = torch.full((6, 1024), 127.0)
    x[1::2] *= -1
    expected = torch.tensor([1.0, -1.0]).repeat(3)[:, None].expand(-1, 40) * (1024 * 255 * 127)
    torch.testing.assert_close(NativeQuantizedLinear(weight, None)(x), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_embedding_reads_rows_of_an_output_layer(layout: Layout, dtype: torch.dtype) -> None:
    weight = random_weight(layout)
    ids = torch.tensor([[3, 0], [layout.rows - 1, 7]])
    expected = weight.dequantized()[ids].to(dtype)
    embedding = NativeQuantizedEmbedding(NativeQuantizedLinear(weight, None), dtype)
    torch.testing.assert_close(embedding(ids), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)
    torch.testing.assert_close(QuantizedEmbedding(weight, dtype)(ids), expected, rtol=0, atol=0)


def test_wrong_inputs_are_refused() -> None:
    layer = NativeQuantizedLinear(random_weight(LAYOUTS[0]), None)
    with pytest.raises(ValueError, match=r"inputs are 8 features in torch\.float32, not 1568 in float32 or bfloat16"):
        layer(torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"inputs are 1568 features in torch\.float64"):
        layer(torch.zeros(1, 1568, dtype=torch.float64))


@pytest.mark.parametrize(("bits", "error"), [(4, 0.11), (8, 0.007)])
def test_rounding_loses_little(bits: int, error: float) -> None:
    """Without a search for scales, 4 bits lose 0.118 of these weights' norm."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    rounded = rounded_to_nearest(weight, bits).dequantized()
    assert (rounded - weight).norm() < error * weight.norm()
    assert not rounded[0, :32].any()


class _Attention(nn.Module):
    def __init__(self, weights: list[QuantizedWeight]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (QuantizedLinear(weight, None, torch.float32) for weight in weights)


def test_layers_that_see_the_same_input_are_joined_if_they_are_alike() -> None:
    layout = LAYOUTS[2]
    x = torch.randn(3, layout.size, generator=torch.Generator().manual_seed(1))
    for last, joined in ((layout, True), (layout._replace(bits=8), False)):
        weights = [random_weight(each) for each in (layout, layout._replace(rows=17), last)]
        attention = _Attention(weights)
        expected = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        use_faster_parts(attention, deterministic=True)
        layers: list[nn.Module] = [attention.q_proj, attention.k_proj, attention.v_proj]
        assert {type(layer) for layer in layers} == {GroupedLinear if joined else NativeQuantizedLinear}
        for layer, result in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), result, rtol=1e-5, atol=1e-4)
