"""Products of rows with the weights of experts, of 4 or 8 bits, in Triton. Sums are as in triton_quantized_linear.py.

Rows are sorted by their expert on the device, and programs take tiles of one expert's rows. How many tiles there are at
most follows from shapes alone, so CUDA graphs can record all of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.quantized_weight import QuantizedWeight
from engine.kernels.triton_quantized_linear import code_numbers

_FEATURES = 64  # of a tile
_MOST_INPUTS = 128  # that are multiplied at once; they are of one group


def fixed_order_experts(x: Tensor, chosen: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return each row's product with the weight of its expert, summed in float32 and rounded once.

    Args:
        x: [S / K, in], float32, bfloat16 or float16; each row for K neighbours of the result.
        chosen: [S] int64, an expert each.
        weight: [E, out, in], in groups of a multiple of 16 inputs.
        bias: [E, out].

    Returns:
        [S, out]
    """
    experts, features, inputs = weight.shape
    count = len(chosen)
    output = torch.empty(count, features, dtype=x.dtype, device=x.device)
    if not count:
        return output
    tile = 16 if count <= 16 * experts else 64
    tiles = _tiles(chosen, experts, tile)
    with torch.cuda.device_of(x):
        _multiply_experts[(triton.cdiv(features, _FEATURES) * tiles.shape[1],)](
            *(x.contiguous(), chosen.argsort(stable=True), tiles, weight.codes, weight.scales),
            weight.scales if weight.offsets is None else weight.offsets,
            weight.scales if weight.table is None else weight.table,
            *(weight.scales if bias is None else bias, output),
            *(tiles.shape[1], count // len(x), features, inputs),
            BITS=weight.bits,
            HAS_TABLE=weight.table is not None,
            FLOATS=weight.floats,
            ZERO=weight.zero,
            GROUP=weight.group,
            HAS_OFFSETS=weight.offsets is not None,
            HAS_BIAS=bias is not None,
            ROWS=tile,
            FEATURES=_FEATURES,
            INPUTS=min(weight.group & -weight.group, _MOST_INPUTS),
            num_stages=4,
            num_warps=4,
        )
    return output


def _tiles(chosen: Tensor, experts: int, tile: int) -> Tensor:
    """Return [3, tiles]: the expert of each tile, its first of the sorted rows, and the end of the expert's rows."""
    most = min(len(chosen), len(chosen) // tile + experts)
    counts = (chosen[:, None] == torch.arange(experts, device=chosen.device)).sum(dim=0)
    ends, needed = counts.cumsum(0), (counts + tile - 1) // tile
    last = needed.cumsum(0)
    index = torch.arange(most, device=chosen.device)
    expert = torch.searchsorted(last, index, right=True).clamp(max=experts - 1)
    first = (ends - counts)[expert] + (index - (last - needed)[expert]) * tile  # beyond the end for tiles too many
    return torch.stack([expert, first, ends[expert]])


@triton.jit(do_not_specialize=["tiles"])
def _multiply_experts(
    x: tl.tensor,  # [count / each, inputs]
    order: tl.tensor,  # [count]: the rows of the result, sorted by their expert
    spans: tl.tensor,  # [3, tiles]
    codes: tl.tensor,  # [experts, features, inputs · BITS / 8]
    scales: tl.tensor,  # [experts, features, inputs / GROUP]
    offsets: tl.tensor,  # the same
    table: tl.tensor,  # [16]
    bias: tl.tensor,  # [experts, features]
    output: tl.tensor,  # [count, features]
    tiles: tl.tensor,
    each: tl.tensor,  # rows of the result for each of x
    features: tl.tensor,
    inputs: tl.tensor,
    BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    FLOATS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Compute a tile of features times rows. Programs that read the same weights are neighbours in the grid."""
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, first, end = tl.load(spans + tile), tl.load(spans + tiles + tile), tl.load(spans + 2 * tiles + tile)
    if first < end:
        feature = (block * FEATURES + tl.arange(0, FEATURES)).to(tl.int64)
        position = first + tl.arange(0, ROWS)
        exists = position < end
        row = tl.load(order + position, mask=exists, other=0)
        column = expert * features + tl.minimum(feature, features - 1)
        vectors = x + (row // each)[None, :] * inputs + tl.arange(0, INPUTS)[:, None]
        code_bytes = codes + column[:, None] * (inputs * BITS // 8) + tl.arange(0, INPUTS * BITS // 8)[None, :]
        groups = inputs // GROUP
        total = tl.zeros([FEATURES, ROWS], tl.float32)
        for start in range(0, inputs, INPUTS):
            packed = tl.load(code_bytes + start * BITS // 8)
            w = code_numbers(packed, table, HAS_TABLE, BITS, FLOATS, ZERO, FEATURES, INPUTS).to(x.dtype.element_ty)
            v = tl.load(vectors + start, mask=exists[None, :], other=0.0)
            group = column * groups + start // GROUP
            total += tl.load(scales + group).to(tl.float32)[:, None] * tl.dot(w, v, input_precision="ieee")
            if HAS_OFFSETS:
                sums = tl.sum(v.to(tl.float32), axis=0)
                total += tl.load(offsets + group).to(tl.float32)[:, None] * sums[None, :]
        if HAS_BIAS:
            total += tl.load(bias + column).to(tl.float32)[:, None]
        tl.store(
            output + row[None, :] * features + feature[:, None],
            total.to(output.dtype.element_ty),
            mask=(feature < features)[:, None] & exists[None, :],
        )
