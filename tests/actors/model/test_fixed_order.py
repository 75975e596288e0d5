"""Products and norms of fixed order: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from torch.nn.functional import linear, rms_norm

from tests.support.interpreter import DEVICE

from actors.model.fixed_order.linear import fixed_order_linear  # isort: skip
from actors.model.fixed_order.norm import fixed_order_rms_norm  # isort: skip

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


def test_product_leaves_the_output_layer_unrounded() -> None:
    x, weight = random(2, 3, 64, dtype=torch.bfloat16), random(40, 64, dtype=torch.bfloat16, seed=1)
    actual = fixed_order_linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(actual, linear(x.float(), weight.float()), rtol=1e-5, atol=1e-4)


def test_product_of_a_slice() -> None:
    x, weight = random(9, 128), random(40, 64, seed=1)
    torch.testing.assert_close(fixed_order_linear(x[:, 64:], weight), linear(x[:, 64:], weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 200, dtype=dtype), random(200, dtype=dtype, seed=1)
    expected = rms_norm(x.float(), (200,), weight.float(), 1e-6)
    actual = fixed_order_rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
