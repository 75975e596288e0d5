"""Products with weights of 4 or 8 bits in Triton: on a GPU if there is one, else in the interpreter."""

import pytest
import torch

from tests.support.interpreter import DEVICE

from engine.kernels.triton_quantized_linear import fixed_order_quantized_linear  # isort: skip
from tests.support.quantized import LAYOUTS, Layout, random_weight  # isort: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (20, torch.float32), (70, torch.bfloat16)])
def test_a_product_is_that_of_the_unpacked_weight(layout: Layout, tokens: int, dtype: torch.dtype) -> None:
    weight = random_weight(layout, device=DEVICE)
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = x.double() @ weight.dequantized().double().T + bias
    result = fixed_order_quantized_linear(x, weight, bias, torch.float32)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_token_gets_the_same_bits_in_every_batch() -> None:
    weight = random_weight(LAYOUTS[0], device=DEVICE)
    x = torch.randn(70, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    together = fixed_order_quantized_linear(x, weight)
    for count in (1, 3, 17, 33):
        assert torch.equal(fixed_order_quantized_linear(x[:count], weight), together[:count])
