"""New keys and values go to their pages, and come back from them, in Triton. Knows nothing of attention.

Pages of 8-bit floats (e4m3) are read as bytes and decoded by integer arithmetic, which every GPU can do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.attention.triton_parts import PACKED
from engine.model.ragged_batch import RaggedBatch


def as_bytes(pages: Tensor) -> Tensor:
    """Return pages of 8-bit floats as bytes, other pages as they are."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tables: Tensor, batch: RaggedBatch) -> None:
    """Write new keys and values to the pages of their columns.

    key, value: [N, kv_heads, D]; keys: [pages, kv_heads, D, page_size]; values: [pages, kv_heads, page_size, D].
    """
    key, value = (as_bytes(new.to(pages.dtype)) for new, pages in ((key, keys), (value, values)))
    tokens, kv_heads, size = key.shape
    with torch.cuda.device_of(key):
        _write[tokens, kv_heads](
            *(key, value, as_bytes(keys), as_bytes(values), tables, batch.slots, batch.row_of, batch.columns),
            *(*key.stride()[:2], *value.stride()[:2], tables.shape[1]),
            KV_HEADS=kv_heads,
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
