"""Root mean square normalisation, in Triton: a program per token, so that its sum has one order.

Zhang and Sennrich, arXiv 1910.07467. Knows nothing of models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def fixed_order_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square, times the weights, rounded once. x: [..., H]; weight: [H]."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    output = torch.empty_like(flat)
    if len(flat):
        with torch.cuda.device_of(x):
            _normalise[(len(flat),)](
                *(flat, weight, output, size, flat.stride(0), eps),
                BLOCK=triton.next_power_of_2(size),
                num_warps=4 if size <= 4096 else 8,
                enable_fp_fusion=False,
            )
    return output.view(x.shape)


@triton.jit
def _normalise(
    x: tl.tensor,  # [N, H]
    weight: tl.tensor,  # [H]
    output: tl.tensor,  # [N, H]
    size: tl.tensor,  # H
    x_stride: tl.tensor,  # between tokens
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Normalise one token. The grid is [N]."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < size
    values = tl.load(x + token * x_stride + index, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / size + eps)
    result = values * scale * tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * size + index, result.to(output.dtype.element_ty), mask=mask)
