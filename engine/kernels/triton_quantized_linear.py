"""A product with weights of 4 or 8 bits, in Triton, whose sums have one order for every number of tokens.

As in engine/kernels/triton_linear.py, weights are the left operand. They are scale · (code − zero) + offset: codes are
multiplied as numbers of the inputs' type, which has all but those of NF4 and FP4 exactly, and each group's sum is
scaled in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.quantized_weight import QuantizedWeight

_FEATURES = 64  # of a tile
_MOST_INPUTS = 128  # that are multiplied at once; they are of one group


def fixed_order_quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x · weightᵀ + bias, summed in float32 and rounded once.

    Args:
        x: [..., in], float32, bfloat16 or float16.
        weight: [out, in], in groups of a multiple of 16 inputs.
        bias: [out].
        out_dtype: of the result; None: that of x.

    Returns:
        [..., out]
    """
    features, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens = len(flat)
    output = torch.empty(tokens, features, dtype=out_dtype or x.dtype, device=x.device)
    tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    blocks = triton.cdiv(features, _FEATURES) * triton.cdiv(tokens, tile)
    if blocks:
        with torch.cuda.device_of(x):
            _multiply_codes[(blocks,)](
                *(flat, weight.codes, weight.scales),
                weight.scales if weight.offsets is None else weight.offsets,
                weight.scales if weight.table is None else weight.table,
                *(weight.scales if bias is None else bias, output),
                *(tokens, features, inputs, flat.stride(0)),
                BITS=weight.bits,
                HAS_TABLE=weight.table is not None,
                FLOATS=weight.floats,
                ZERO=weight.zero,
                GROUP=weight.group,
                HAS_OFFSETS=weight.offsets is not None,
                HAS_BIAS=bias is not None,
                TOKENS=tile,
                FEATURES=_FEATURES,
                INPUTS=min(weight.group & -weight.group, _MOST_INPUTS),
                num_stages=4,
                num_warps=4,
            )
    return output.view(*x.shape[:-1], features)


@triton.jit
def code_numbers(
    packed: tl.tensor,
    table: tl.tensor,
    HAS_TABLE: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ZERO: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
) -> tl.tensor:
    """Return the numbers that codes stand for, without scales, [FEATURES, INPUTS]. packed: uint8; table: [16]."""
    if BITS == 4:
        packed = tl.reshape(tl.join(packed & 15, packed >> 4), [FEATURES, INPUTS])
    if FLOATS:  # of type float8_e4m3fn; those without a leading one get it, and lose it again
        size = (packed & 127).to(tl.int32) << 20
        small = size < 1 << 23
        shifted = (size + tl.where(small, 121 << 23, 120 << 23)).to(tl.float32, bitcast=True)
        numbers = shifted - tl.where(small, 0.015625, 0.0)
        numbers = tl.where(packed < 128, numbers, -numbers)
    elif HAS_TABLE:
        numbers = tl.load(table + packed.to(tl.int32))
    else:
        numbers = (packed.to(tl.int32) - ZERO).to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["tokens"])
def _multiply_codes(
    x: tl.tensor,  # [tokens, inputs]
    codes: tl.tensor,  # [features, inputs · BITS / 8]
    scales: tl.tensor,  # [features, inputs / GROUP]
    offsets: tl.tensor,  # the same
    table: tl.tensor,  # [16]
    bias: tl.tensor,  # [features]
    output: tl.tensor,  # [tokens, features]
    tokens: tl.tensor,
    features: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,  # between tokens
    BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    FLOATS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Compute a tile of features times tokens. Programs that read the same weights are neighbours in the grid."""
    token_blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0)
    feature = (block // token_blocks * FEATURES + tl.arange(0, FEATURES)).to(tl.int64)
    token = (block % token_blocks * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    exists = (token < tokens)[None, :]
    row = tl.minimum(feature, features - 1)
    vectors = x + token[None, :] * x_stride + tl.arange(0, INPUTS)[:, None]
    code_bytes = codes + row[:, None] * (inputs * BITS // 8) + tl.arange(0, INPUTS * BITS // 8)[None, :]
    groups = inputs // GROUP
    total = tl.zeros([FEATURES, TOKENS], tl.float32)
    for start in range(0, inputs, INPUTS):
        packed = tl.load(code_bytes + start * BITS // 8)
        w = code_numbers(packed, table, HAS_TABLE, BITS, FLOATS, ZERO, FEATURES, INPUTS).to(x.dtype.element_ty)
        v = tl.load(vectors + start, mask=exists, other=0.0)
        group = row * groups + start // GROUP
        total += tl.load(scales + group).to(tl.float32)[:, None] * tl.dot(w, v, input_precision="ieee")
        if HAS_OFFSETS:
            sums = tl.sum(v.to(tl.float32), axis=0)
            total += tl.load(offsets + group).to(tl.float32)[:, None] * sums[None, :]
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
    tl.store(
        output + token[None, :] * features + feature[:, None],
        total.to(output.dtype.element_ty),
        mask=(feature < features)[:, None] & exists,
    )
