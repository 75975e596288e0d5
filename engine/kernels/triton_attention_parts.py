"""Parts of attention in Triton: pages written and read, what tokens see, and how parts of a softmax become one.

Pages of 8-bit floats (e4m3) are read as bytes and decoded by integer arithmetic, which every GPU can do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention import AttentionArgs

LOG2_E = tl.constexpr(1.4426950408889634)
# Parts of one packed tensor, whose alignment depends on the numbers of rows and tokens. No kernel is compiled for that.
PACKED = "slots", "offsets", "lengths", "columns", "row_of", "positions", "trunks", "branches"


@triton.jit(do_not_specialize=["rows", "entries"], do_not_specialize_on_alignment=PACKED)
def merge_parts(
    offsets: tl.tensor,  # [B + 1] int64
    lengths: tl.tensor,  # [B] int64
    row_of: tl.tensor,  # [N] int64
    positions: tl.tensor,  # [N] int64
    trunks: tl.tensor,  # [N] int64
    branches: tl.tensor,  # [N] int64
    output: tl.tensor,  # [N, heads, Dv]
    partials: tl.tensor,  # [entries, heads, Dv] float32
    statistics: tl.tensor,  # [entries, heads, 2] float32
    reach: tl.tensor,
    rows: tl.tensor,  # B
    entries: tl.tensor,
    sinks: tl.tensor,  # [heads]
    HAS_SINKS: tl.constexpr,
    LIMITED: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Merge the parts of one token and kv head from the first on, if its row was split. The grid is [N, kv_heads]."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_of + token)
    entry, is_split = entries_of(row, offsets, lengths, rows, entries, PART, ROWS, SPLIT_TOKENS)
    if is_split == 0:
        return
    length = tl.load(lengths + row).to(tl.int32)
    entry += (token - tl.load(offsets + row)) * tl.cdiv(length, PART)
    rank = tl.arange(0, FOLDED)
    head, exists = kv_head * GROUP + rank, rank < GROUP
    _, _, earliest, latest = visible(
        token + rank * 0, rank >= 0, positions, trunks, branches, reach, LIMITED, IN_CHUNKS
    )  # the same for all heads
    first_part = tl.minimum(tl.min(earliest), length - 1) // PART
    end_part = tl.cdiv(tl.minimum(tl.max(latest), length), PART)
    feature = tl.arange(0, VALUE_BLOCK)
    stored = exists[:, None] & (feature < VALUE_SIZE)[None, :]
    maximum = tl.full([FOLDED], float("-inf"), tl.float32)
    weight = tl.zeros([FOLDED], tl.float32)
    total = tl.zeros([FOLDED, VALUE_BLOCK], tl.float32)
    for part in tl.range(first_part, end_part, num_stages=4):
        line = (entry + part) * (KV_HEADS * GROUP) + head
        part_maximum = tl.load(statistics + line * 2, mask=exists, other=float("-inf"))
        part_weight = tl.load(statistics + line * 2 + 1, mask=exists, other=0.0)
        part_total = tl.load(partials + (line * VALUE_SIZE)[:, None] + feature[None, :], mask=stored, other=0.0)
        maximum, weight, total = merge(maximum, weight, total, part_maximum, part_weight, part_total)
    result = finish(maximum, weight, total, sinks, head, exists, HAS_SINKS)
    tl.store(
        output + ((token.to(tl.int64) * (KV_HEADS * GROUP) + head) * VALUE_SIZE)[:, None] + feature[None, :],
        result.to(output.dtype.element_ty),
        mask=stored,
    )


@triton.jit
def entries_of(
    row: tl.tensor,
    offsets: tl.tensor,
    lengths: tl.tensor,
    rows: tl.tensor,
    entries: tl.tensor,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a row's first entry, and whether its parts are split: it has several, few tokens, and entries for all."""
    index = tl.arange(0, ROWS)
    count = tl.load(offsets + index + 1, mask=index < rows, other=0) - tl.load(
        offsets + index, mask=index < rows, other=0
    )
    parts = (tl.load(lengths + index, mask=index < rows, other=0) + PART - 1) // PART
    wanted = tl.where((parts > 1) & (count <= SPLIT_TOKENS), count * parts, 0)  # [B]
    first = tl.sum(tl.where(index < row, wanted, 0))
    own = tl.sum(tl.where(index == row, wanted, 0))
    return first, ((own > 0) & (first + own <= entries)).to(tl.int32)


@triton.jit
def visible(
    token: tl.tensor,  # [Q]
    exists: tl.tensor,  # [Q]
    positions: tl.tensor,
    trunks: tl.tensor,
    branches: tl.tensor,
    reach: tl.tensor,
    LIMITED: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return what tokens see, [Q] each: trunks, branches, the first text column, and the first column beyond all."""
    trunk = tl.load(trunks + token, mask=exists, other=0).to(tl.int32)
    branch = tl.load(branches + token, mask=exists, other=0)
    latest = trunk + tl.where(branch == 0, 0, 64)
    earliest = trunk * 0
    if LIMITED:
        position = tl.load(positions + token, mask=exists, other=0).to(tl.int32)
        earliest = position // reach * reach if IN_CHUNKS else tl.maximum(position - reach + 1, 0)
    return trunk, branch, tl.where(exists, earliest, 2147483647), latest


@triton.jit
def merge(
    maximum: tl.tensor,  # [Q]
    weight: tl.tensor,  # [Q]
    total: tl.tensor,  # [Q, Dv]
    part_maximum: tl.tensor,
    part_weight: tl.tensor,
    part_total: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest score, the sum of weights and the weighted sum of values of two sets of columns."""
    largest = tl.maximum(maximum, part_maximum)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    faded, part_faded = tl.exp2(maximum - finite), tl.exp2(part_maximum - finite)
    weight = weight * faded + part_weight * part_faded
    return largest, weight, total * faded[:, None] + part_total * part_faded[:, None]


@triton.jit
def finish(
    maximum: tl.tensor,  # [Q]
    weight: tl.tensor,  # [Q]
    total: tl.tensor,  # [Q, Dv]
    sinks: tl.tensor,  # [heads]
    head: tl.tensor,  # [Q]
    exists: tl.tensor,  # [Q]
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """Return the mean of values, [Q, Dv]; a sink takes part in the sum of weights."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.maximum(maximum, sink)
        faded = tl.exp2(maximum - largest)
        weight = weight * faded + tl.exp2(sink - largest)
        total = total * faded[:, None]
    return total / tl.where(weight > 0, weight, 1.0)[:, None]


@triton.jit
def store_part(
    line: tl.tensor,  # [Q]
    exists: tl.tensor,  # [Q]
    maximum: tl.tensor,  # [Q]
    weight: tl.tensor,  # [Q]
    total: tl.tensor,  # [Q, Dv]
    partials: tl.tensor,
    statistics: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Store what `merge_parts` merges."""
    feature = tl.arange(0, VALUE_BLOCK)
    tl.store(statistics + line * 2, maximum, mask=exists)
    tl.store(statistics + line * 2 + 1, weight, mask=exists)
    tl.store(
        partials + (line * VALUE_SIZE)[:, None] + feature[None, :],
        total,
        mask=exists[:, None] & (feature < VALUE_SIZE)[None, :],
    )


def as_bytes(pages: Tensor) -> Tensor:
    """Return pages of 8-bit floats as bytes, other pages as they are."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def write(args: AttentionArgs) -> None:
    """Write the new keys and values to the pages of their columns."""
    keys, batch, stores_values = args.keys, args.batch, args.values is not None
    values = keys if args.values is None else args.values
    key, value = as_bytes(args.key.to(keys.dtype)), as_bytes(args.value.to(values.dtype))
    tokens, kv_heads, size = key.shape
    with torch.cuda.device_of(key):
        _write[tokens, kv_heads](
            *(key, value, as_bytes(keys), as_bytes(values), args.tables, batch.slots, batch.row_of, batch.columns),
            *(*key.stride()[:2], *value.stride()[:2], args.tables.shape[1]),
            KV_HEADS=kv_heads,
            STORES_VALUES=stores_values,
            PAGE=keys.shape[-1],
            SIZE=size,
            VALUE_SIZE=value.shape[-1],
            BLOCK=triton.next_power_of_2(max(size, value.shape[-1])),
            num_warps=1,
        )


@triton.jit(do_not_specialize_on_alignment=PACKED)
def _write(
    key: tl.tensor,  # [N, kv_heads, D]
    value: tl.tensor,  # [N, kv_heads, Dv]
    keys: tl.tensor,  # [pages, kv_heads, D, page]
    values: tl.tensor,  # [pages, kv_heads, page, Dv]
    tables: tl.tensor,  # [slots + 1, P] int32
    slots: tl.tensor,  # [B] int64
    row_of: tl.tensor,  # [N] int64
    columns: tl.tensor,  # [N] int64
    key_stride: tl.tensor,  # between tokens
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_width: tl.tensor,  # P
    KV_HEADS: tl.constexpr,
    STORES_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one token's key and value of one kv head. The grid is [N, kv_heads]."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + tl.load(row_of + token))
    column = tl.load(columns + token)
    page = tl.load(tables + slot * table_width + column // PAGE).to(tl.int64) * KV_HEADS + kv_head
    feature = tl.arange(0, BLOCK)
    k = tl.load(key + token * key_stride + kv_head * key_head_stride + feature, mask=feature < SIZE)
    tl.store(keys + page * (SIZE * PAGE) + feature * PAGE + column % PAGE, k, mask=feature < SIZE)
    if STORES_VALUES:
        v = tl.load(value + token * value_stride + kv_head * value_head_stride + feature, mask=feature < VALUE_SIZE)
        tl.store(values + (page * PAGE + column % PAGE) * VALUE_SIZE + feature, v, mask=feature < VALUE_SIZE)


@triton.jit
def load_as(pointers: tl.tensor, mask: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Load numbers of a page as `dtype`, zeros where masked. Bytes are e4m3 floats."""
    loaded = tl.load(pointers, mask=mask, other=0)
    if loaded.dtype == tl.uint8:
        # Sign, exponent and mantissa moved to their places in a float16, whose exponent's bias is larger by 8.
        bits = loaded.to(tl.uint16)
        loaded = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return loaded.to(dtype)
