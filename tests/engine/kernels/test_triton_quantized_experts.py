"""Products with the weights of experts in Triton: on a GPU if there is one, else in the interpreter."""

import pytest
import torch

from tests.support.interpreter import DEVICE

from engine.kernels.triton_quantized_experts import fixed_order_experts  # isort: skip
from tests.support.quantized import LAYOUTS, Layout, experts_of  # isort: skip

COUNT, CHOSEN = 5, 2


def choose(tokens: int) -> torch.Tensor:
    """Return CHOSEN experts for each token; nobody chooses the last one."""
    noise = torch.rand(tokens, COUNT - 1, generator=torch.Generator().manual_seed(3))
    return noise.argsort(dim=-1)[:, :CHOSEN].contiguous().to(DEVICE)


@pytest.mark.parametrize("layout", LAYOUTS[1:4] + LAYOUTS[-1:], ids=str)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (60, torch.float32)])
def test_each_row_is_multiplied_with_its_experts_weight(layout: Layout, tokens: int, dtype: torch.dtype) -> None:
    """A token gets the same bits alone."""
    weight = experts_of(layout, COUNT, device=DEVICE)
    bias = torch.randn(COUNT, layout.rows, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x = torch.randn(tokens, layout.size, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    chosen = choose(tokens)
    result = fixed_order_experts(x, chosen.flatten(), weight, bias)
    plain = weight.dequantized().double()[chosen.flatten()]
    rows = x.double().repeat_interleave(CHOSEN, dim=0)
    expected = (plain @ rows[..., None])[..., 0] + bias[chosen.flatten()]
    rounding = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter truncates
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=rounding * float(expected.abs().max()))
    last = fixed_order_experts(x[-1:], chosen[-1], weight, bias)
    assert torch.equal(last, result[-CHOSEN:])
