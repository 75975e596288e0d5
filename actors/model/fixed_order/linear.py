"""A product with weights, in Triton, whose sums have one order for every number of tokens.

Weights are the left operand, tokens the right one. So the same instruction, of 64 features times 16 inputs on Hopper
and 16 times 16 before, serves any number of tokens, and no sum is split. Knows nothing of models.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class _Tile(NamedTuple):
    """What a program computes. Bits do not depend on it: each sum runs over the inputs in their order."""

    tokens: int
    features: int
    inputs: int
    stages: int
    warps: int


_FEW, _SOME, _MANY = _Tile(16, 64, 128, 5, 4), _Tile(64, 64, 128, 4, 4), _Tile(128, 128, 64, 4, 8)
_FLOAT32 = _Tile(16, 64, 32, 2, 4)  # sums by single multiplications, in registers


def fixed_order_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x · weightᵀ + bias, summed in float32 and rounded once.

    Args:
        x: [..., in_features], float32, bfloat16 or float16.
        weight: [out_features, in_features] of the same type, contiguous.
        bias: [out_features].
        out_dtype: of the result; None: that of x.

    Returns:
        [..., out_features]
    """
    features, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    tokens = len(flat)
    output = torch.empty(tokens, features, dtype=out_dtype or x.dtype, device=x.device)
    tile = _tile(tokens, x.dtype)
    blocks = triton.cdiv(features, tile.features) * triton.cdiv(tokens, tile.tokens)
    if blocks:
        with torch.cuda.device_of(x):
            _multiply[(blocks,)](
                *(flat, weight, weight if bias is None else bias, output),
                *(tokens, features, inputs, flat.stride(0)),
                HAS_BIAS=bias is not None,
                EVEN=inputs % tile.inputs == 0,
                TOKENS=tile.tokens,
                FEATURES=tile.features,
                INPUTS=tile.inputs,
                num_stages=tile.stages,
                num_warps=tile.warps,
            )
    return output.view(*x.shape[:-1], features)


def _tile(tokens: int, dtype: torch.dtype) -> _Tile:
    """Return the tile that reads weights fastest for so many tokens."""
    if dtype == torch.float32:
        return _FLOAT32
    return next((tile for tile in (_FEW, _SOME) if tokens <= tile.tokens), _MANY)


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x: tl.tensor,  # [tokens, inputs]
    weight: tl.tensor,  # [features, inputs]
    bias: tl.tensor,  # [features]
    output: tl.tensor,  # [tokens, features]
    tokens: tl.tensor,
    features: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,  # between tokens
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # whether blocks of inputs are full
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Compute a tile of features times tokens. Programs that read the same weights are neighbours in the grid."""
    token_blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0)
    feature = (block // token_blocks * FEATURES + tl.arange(0, FEATURES)).to(tl.int64)
    token = (block % token_blocks * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    index = tl.arange(0, INPUTS)
    weights = weight + tl.minimum(feature, features - 1)[:, None] * inputs + index[None, :]
    vectors = x + token[None, :] * x_stride + index[:, None]
    exists = (token < tokens)[None, :]
    total = tl.zeros([FEATURES, TOKENS], tl.float32)
    for start in range(0, inputs, INPUTS):
        if EVEN:
            w = tl.load(weights + start)
            v = tl.load(vectors + start, mask=exists, other=0.0)
        else:
            rest = inputs - start
            w = tl.load(weights + start, mask=(index < rest)[None, :], other=0.0)
            v = tl.load(vectors + start, mask=exists & (index < rest)[:, None], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
    tl.store(
        output + token[None, :] * features + feature[:, None],
        total.to(output.dtype.element_ty),
        mask=(feature < features)[:, None] & exists,
    )
