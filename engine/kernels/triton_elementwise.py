"""Rotation, gates and norms in one pass over memory, in Triton, with the rounding of transformers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # elements of a program of `silu_gate`
_HEADS = 8  # of a program of `rotate`


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by position, Su et al., arXiv 2104.09864, in the half-split form of GPT-NeoX.

    query: [1, heads, N, D]; key: [1, kv_heads, N, D]; cos, sin: [1, N, D], contiguous. Returns both in the
    shapes given.
    """
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    rotated = query.new_empty(1, tokens, heads + kv_heads, size)
    with torch.cuda.device_of(query):
        _rotate[(tokens, triton.cdiv(heads + kv_heads, _HEADS))](
            *(query, key, cos, sin, rotated, heads, heads + kv_heads, size),
            *(query.stride(1), query.stride(2), key.stride(1), key.stride(2)),
            HEADS=_HEADS,
            HALF_BLOCK=triton.next_power_of_2(size // 2),
            num_warps=2,
            enable_fp_fusion=False,
        )
    rotated_query, rotated_key = rotated.transpose(1, 2).split([heads, kv_heads], dim=1)
    return rotated_query, rotated_key


def silu_gate(both: Tensor) -> Tensor:
    """Return silu(gate) · up, [..., I], of SwiGLU, Shazeer, arXiv 2002.05202. both: [..., 2 I], gate before up."""
    size = both.shape[-1] // 2
    flat = both.reshape(-1, 2 * size).contiguous()
    output = both.new_empty(len(flat), size)
    if len(flat):
        with torch.cuda.device_of(both):
            _silu_gate[(len(flat), triton.cdiv(size, _BLOCK))](
                *(flat, output, size), BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
            )
    return output.view(*both.shape[:-1], size)


@triton.jit
def _rotate(
    query: tl.tensor,  # [heads, N, D]
    key: tl.tensor,  # [kv_heads, N, D]
    cos: tl.tensor,  # [N, D]
    sin: tl.tensor,  # [N, D]
    rotated: tl.tensor,  # [N, heads + kv_heads, D]
    heads: tl.tensor,
    all_heads: tl.tensor,
    size: tl.tensor,  # D
    query_head_stride: tl.tensor,
    query_stride: tl.tensor,  # between tokens
    key_head_stride: tl.tensor,
    key_stride: tl.tensor,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """Rotate some heads of one token. The grid is [N, blocks of heads]; keys' heads follow the queries'."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    half = size // 2
    index = tl.arange(0, HALF_BLOCK)[None, :]
    exists = index < half
    mask = (head < all_heads) & exists
    query_start = query + head * query_head_stride + token * query_stride
    key_start = key + (head - heads) * key_head_stride + token * key_stride
    source = tl.where(head < heads, query_start, key_start)  # [HEADS, 1]
    left = tl.load(source + index, mask=mask)
    right = tl.load(source + half + index, mask=mask)
    cosines, sines = cos + token * size + index, sin + token * size + index
    new_left = _product(left, tl.load(cosines, mask=exists)) - _product(right, tl.load(sines, mask=exists))
    new_right = _product(right, tl.load(cosines + half, mask=exists)) + _product(
        left, tl.load(sines + half, mask=exists)
    )
    target = rotated + (token * all_heads + head) * size + index
    tl.store(target, new_left.to(left.dtype), mask=mask)
    tl.store(target + half, new_right.to(left.dtype), mask=mask)


@triton.jit
def _product(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Multiply, and round to the operands' type; float32."""
    return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype).to(tl.float32)


@triton.jit
def _silu_gate(
    both: tl.tensor,  # [N, 2 I]
    output: tl.tensor,  # [N, I]
    size: tl.tensor,  # I
    BLOCK: tl.constexpr,
) -> None:
    """Gate a block of one token. The grid is [N, blocks]."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    gate = tl.load(both + token * 2 * size + index, mask=mask, other=0.0)
    up = tl.load(both + token * 2 * size + size + index, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(0.0 - wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + token * size + index, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


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
