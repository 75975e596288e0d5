"""A product with weights, in Triton, whose sums have one order for every number of tokens.

Weights are the left operand, tokens the right one. So the same instruction, of 64 features times 16 inputs on Hopper
and 16 times 16 before, serves any number of tokens, and no sum is split. That was tested on Hopper; data centres'
Blackwell multiplies by other instructions.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class _Tile(NamedTuple):
    """What a program computes. Bits do not depend on it: each sum runs over the inputs in their order."""

    tokens: int
    features: int
    inputs: int
    stages: int
    warps: int

    def fitting(self, shared_bytes: int) -> "_Tile":
        """Return the same with as many stages as a program's shared memory holds, of 16-bit numbers."""
        stage_bytes = 2 * self.inputs * (self.tokens + self.features)
        return self._replace(stages=max(min(self.stages, shared_bytes // stage_bytes), 1))


class _Gpu(NamedTuple):
    """What the choice of a tile depends on."""

    processors: int
    shared_bytes: int  # of a program
    copies_tiles: bool  # by its copy engine, from descriptors of tensors


_FLOAT32 = _Tile(16, 64, 32, 2, 4)  # sums by single multiplications, in registers
_DESCRIBED_TOKENS = 64  # in tiles of so many or more, threads' own copies would take longer
_ALIGNMENT = 16  # bytes, of the lines of a tensor with a descriptor


def fixed_order_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x · weightᵀ + bias, summed in float32 and rounded once.

    Args:
        x: [..., in_features], float32, bfloat16 or float16; with H heads [..., H, in_features].
        weight: [out_features, in_features] or [H, out_features, in_features] of the same type, contiguous.
        bias: [out_features].
        out_dtype: of the result; None: that of x.

    Returns:
        [..., out_features] or [..., H, out_features]
    """
    features, inputs = weight.shape[-2:]
    heads = weight.shape[0] if weight.dim() == 3 else 1
    flat = x.reshape(-1, heads * inputs)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens = len(flat)
    output = torch.empty(tokens, heads * features, dtype=out_dtype or x.dtype, device=x.device)
    gpu = _gpu(x.device)
    tile = _FLOAT32 if x.dtype == torch.float32 else _tile(tokens, features, gpu).fitting(gpu.shared_bytes)
    blocks = triton.cdiv(features, tile.features) * triton.cdiv(tokens, tile.tokens)
    described = (
        heads == 1
        and gpu.copies_tiles
        and tile.tokens >= _DESCRIBED_TOKENS
        and _is_aligned(flat)
        and _is_aligned(weight)
    )
    if blocks:
        with torch.cuda.device_of(x):
            _multiply[(blocks, heads)](
                TensorDescriptor.from_tensor(flat, [tile.tokens, tile.inputs]) if described else flat,
                TensorDescriptor.from_tensor(weight, [tile.features, tile.inputs]) if described else weight,
                *(weight if bias is None else bias, output),
                *(tokens, features, inputs, flat.stride(0)),
                DESCRIBED=described,
                HAS_BIAS=bias is not None,
                EVEN=inputs % tile.inputs == 0,
                TOKENS=tile.tokens,
                FEATURES=tile.features,
                INPUTS=tile.inputs,
                num_stages=tile.stages,
                num_warps=tile.warps,
            )
    return output.view(*x.shape[:-1], features)


def _tile(tokens: int, features: int, gpu: _Gpu) -> _Tile:
    """Return the fastest of the tiles measured on an H200 (docs/experiments.md), which has 132 processors."""
    few = 2 * triton.cdiv(features, 64) <= gpu.processors  # weights fill half of the GPU: read them twice, or deeper
    if tokens <= 16:
        return _Tile(16, 64, 128, 8 if few else 5, 4)
    if tokens <= 32 or (tokens <= 64 and few):
        return _Tile(32, 64, 128, 6, 4)
    if tokens <= 64:
        return _Tile(64, 64, 128, 6, 4)
    blocks = triton.cdiv(features, 128) * triton.cdiv(tokens, 128)
    if blocks > gpu.processors and gpu.copies_tiles:  # two programs on each, or twice the work
        return _Tile(128, 128, 64, 3, 4) if tokens < 1024 else _Tile(256, 128, 64, 4, 8)
    return _Tile(128, 128, 64, 4, 8) if 2 * blocks > gpu.processors else _Tile(128, 64, 128, 4, 4)


@cache
def _gpu(device: torch.device) -> _Gpu:
    """Return what a device is like; for a CPU, in the interpreter, an H200."""
    if device.type == "cpu":
        return _Gpu(132, 227 << 10, copies_tiles=True)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    copies_tiles = torch.cuda.get_device_capability(device) >= (9, 0)
    return _Gpu(properties["multiprocessor_count"], properties["max_shared_mem"], copies_tiles)


def _is_aligned(matrix: Tensor) -> bool:
    """Whether a matrix, whose lines are contiguous, may have a descriptor."""
    line_bytes, overlaps = matrix.stride(0) * matrix.itemsize, matrix.stride(0) < matrix.shape[1]
    return line_bytes % _ALIGNMENT == 0 and matrix.data_ptr() % _ALIGNMENT == 0 and not overlaps


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x: tl.tensor,  # [tokens, heads, inputs], or of a single head a descriptor of it
    weight: tl.tensor,  # [heads, features, inputs], or a descriptor of it
    bias: tl.tensor,  # [features]
    output: tl.tensor,  # [tokens, heads, features]
    tokens: tl.tensor,
    features: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,  # between tokens
    DESCRIBED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # whether blocks of inputs are full
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Compute a tile of features times tokens. Programs that read the same weights are neighbours in the grid.

    The grid is [tiles, heads].
    """
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    token_blocks = tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0)
    first_feature, first_token = block // token_blocks * FEATURES, block % token_blocks * TOKENS
    feature = (first_feature + tl.arange(0, FEATURES)).to(tl.int64)
    token = (first_token + tl.arange(0, TOKENS)).to(tl.int64)
    exists = (token < tokens)[None, :]
    index = tl.arange(0, INPUTS)
    if not DESCRIBED:
        weights = weight + (head * features + tl.minimum(feature, features - 1))[:, None] * inputs + index[None, :]
        vectors = x + head * inputs + token[None, :] * x_stride + index[:, None]
    total = tl.zeros([FEATURES, TOKENS], tl.float32)
    for start in range(0, inputs, INPUTS):
        if DESCRIBED:  # zero where there is nothing
            w = weight.load([first_feature, start])
            v = tl.trans(x.load([first_token, start]))
        elif EVEN:
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
        output + (token * heads + head)[None, :] * features + feature[:, None],
        total.to(output.dtype.element_ty),
        mask=(feature < features)[:, None] & exists,
    )
