"""Attention over pages on GPUs, in Triton: what `attention.py` computes, each key and value read once.

Scores are combined in parts of `PART` columns, from the first on, always by the same tile of queries. So a token's
result has the same bits in a chunk, alone or after drafts, whatever runs beside it, and however the work is divided.
Only tokens that see scattered columns, in trees with branches, may differ in the last bit.

Hong et al., "FlashDecoding++", arXiv 2311.01282, and Dao, "FlashAttention-2", arXiv 2307.08691, describe the method.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention import AttentionArgs
from engine.kernels.triton_attention_parts import (
    LOG2_E,
    PACKED,
    as_bytes,
    entries_of,
    finish,
    load_as,
    merge,
    merge_parts,
    store_part,
    visible,
    write,
)

_PROGRAMS = 2048  # that keep a GPU busy
_MOST_STRIDES = 8  # programs for a long row's parts beside many rows
_LATENT_QUERIES = 16  # of a tile, where values are as long as latents
_LEAST_ROWS = 128  # one for each thread of a program; fewer would be another kernel, to be compiled while requests wait


class Tiling(NamedTuple):
    """How the work is divided; tests make it small. The results' bits depend on `part` and `block`."""

    part: int = 512  # columns of which a softmax is computed before it is merged with the others
    block: int = 128  # columns that are read at a time
    split_tokens: int = 64  # rows of more tokens have tiles enough: their parts are not spread over programs
    partial_bytes: int = 128 << 20  # memory for parts; a row that finds no room has them computed one by one

    def entries(self, wanted: int, entry_bytes: int) -> int:
        """Return how many parts there is memory for, at least one and at most `wanted`."""
        return max(min(self.partial_bytes // entry_bytes, wanted), 1)

    @classmethod
    def of(cls, query: Tensor, keys: Tensor) -> "Tiling":
        """Return one whose blocks fit into a GPU's registers. query: [N, heads, D]; keys: [pages, kv_heads, …]."""
        if query.shape[-1] > 128 or query.element_size() != 2:
            return cls(block=32)
        is_narrow = _folded(query.shape[1] // keys.shape[1]) <= 4 and keys.element_size() == 2
        return cls(block=128 if is_narrow else 64)


def attend(args: AttentionArgs, tiling: Tiling | None = None) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, D].

    The host reads shapes only, so a CUDA graph of it serves all batches of N tokens in B rows.
    """
    write(args)
    query, keys, tables, batch = args.query, args.keys, args.tables, args.batch
    values, latent = (keys, True) if args.values is None else (args.values, False)
    tiling = tiling or Tiling.of(query, keys)
    tokens, heads, size = query.shape
    reach = 0 if args.reach is None else args.reach.size
    kv_heads, value_size, page_size = keys.shape[1], args.value_size, keys.shape[-1]
    divided = _divided(heads // kv_heads) if latent else 1
    group, groups, rows = heads // kv_heads // divided, kv_heads * divided, len(batch.lengths)
    folded = _folded(group)
    queries = _LATENT_QUERIES if latent else max(16, min(8 * folded, 64), folded)  # of a tile
    first = value_size if latent else size
    most_parts = -(-tables.shape[1] * page_size // tiling.part)
    tiles = tokens // (queries // folded) + rows
    strides = min(most_parts, max(_PROGRAMS // (tiles * groups), _MOST_STRIDES))
    entries = tiling.entries(tokens * most_parts, 4 * heads * (value_size + 2))
    partials = query.new_empty(entries, heads, value_size, dtype=torch.float32)
    statistics = query.new_empty(entries, heads, 2, dtype=torch.float32)
    output = query.new_empty(tokens, heads, value_size)
    shared = {
        "sinks": query if args.sinks is None else args.sinks,
        "HAS_SINKS": args.sinks is not None,
        "LIMITED": args.reach is not None,
        "IN_CHUNKS": args.reach is not None and args.reach.in_chunks,
        "PART": tiling.part,
        "ROWS": max(triton.next_power_of_2(rows), _LEAST_ROWS),
        "SPLIT_TOKENS": tiling.split_tokens,
        "GROUP": group,
        "FOLDED": folded,
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": max(triton.next_power_of_2(value_size), 16),
        "enable_fp_fusion": False,  # or programs that divide the work differently could round differently
    }
    with torch.cuda.device_of(query):
        _attend_to_parts[tiles, groups, strides](
            *(query, as_bytes(keys), as_bytes(values), tables, batch.slots, batch.offsets, batch.lengths),
            *(batch.positions, batch.trunks, args.branches, output, partials, statistics),
            *(args.scale, reach, args.softcap or 1.0, *query.stride()[:2], tables.shape[1], rows, entries),
            CAPPED=args.softcap is not None,
            QUERIES=queries,
            BLOCK=tiling.block,
            KV_HEADS=kv_heads,
            DIVIDED=divided,
            LATENT=latent,
            PAGE=page_size,
            SIZE=size,
            FIRST=first,
            FIRST_BLOCK=max(triton.next_power_of_2(first), 16),
            REST_BLOCK=max(triton.next_power_of_2(size - first), 16),
            num_warps=4,
            num_stages=4 // query.element_size() if latent else 3,
            **shared,
        )
        if most_parts > 1:
            merge_parts[tokens, groups](
                *(batch.offsets, batch.lengths, batch.row_of, batch.positions, batch.trunks, args.branches),
                *(output, partials, statistics, reach, rows, entries),
                KV_HEADS=groups,
                num_warps=4 if latent else 1,
                **shared,
            )
    return output


def _divided(group: int) -> int:
    """Return among how many programs the queries of a latent are divided: their sums fill the registers."""
    return next(count for count in range(1, group + 1) if group % count == 0 and group // count <= _LATENT_QUERIES)


def _folded(group: int) -> int:
    """Return how many queries of a tile a token takes: a head of the group each, and padding."""
    return int(triton.next_power_of_2(group))


@triton.jit(do_not_specialize=["rows", "entries"], do_not_specialize_on_alignment=PACKED)
def _attend_to_parts(
    query: tl.tensor,  # [N, heads, D]
    keys: tl.tensor,  # [pages, kv_heads, D, page]
    values: tl.tensor,  # [pages, kv_heads, page, Dv]
    tables: tl.tensor,  # [slots + 1, P] int32
    slots: tl.tensor,  # [B] int64
    offsets: tl.tensor,  # [B + 1] int64
    lengths: tl.tensor,  # [B] int64
    positions: tl.tensor,  # [N] int64
    trunks: tl.tensor,  # [N] int64
    branches: tl.tensor,  # [N] int64
    output: tl.tensor,  # [N, heads, Dv]
    partials: tl.tensor,  # [entries, heads, Dv] float32: each part's weighted sum of values
    statistics: tl.tensor,  # [entries, heads, 2] float32: its largest score and the sum of its weights
    scale: tl.tensor,
    reach: tl.tensor,
    softcap: tl.tensor,
    query_stride: tl.tensor,  # between tokens
    head_stride: tl.tensor,
    table_width: tl.tensor,  # P
    rows: tl.tensor,  # B
    entries: tl.tensor,
    sinks: tl.tensor,  # [heads]
    HAS_SINKS: tl.constexpr,
    LIMITED: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    FOLDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIVIDED: tl.constexpr,
    LATENT: tl.constexpr,  # whether values are the beginnings of keys
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,  # features of keys in a first part: those of values if they are the same
    FIRST_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Attend from a tile of one row's tokens, times the heads of a group, to one kv head.

    The grid is [tiles, kv_heads · DIVIDED, strides]: so many groups have the same kv head. A row whose parts are split
    over programs leaves an entry per token and part for `merge_parts`; for others the first program merges all parts
    and writes the result.
    """
    TOKENS: tl.constexpr = QUERIES // FOLDED
    tile, heads, stride = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = heads // DIVIDED
    HEADS: tl.constexpr = KV_HEADS * DIVIDED * GROUP
    row, start, end, tile_start = _find_tile(tile, offsets, rows, TOKENS, ROWS)
    length = tl.load(lengths + row).to(tl.int32)
    if (tile_start >= end) | (stride * PART >= length):
        return
    entry, is_split = entries_of(row, offsets, lengths, rows, entries, PART, ROWS, SPLIT_TOKENS)
    if (stride > 0) & (is_split == 0):
        return

    rank = tl.arange(0, QUERIES)
    token = tile_start + rank // FOLDED  # [Q]
    head = heads * GROUP + rank % FOLDED
    exists = (token < end) & (rank % FOLDED < GROUP)
    feature = tl.arange(0, FIRST_BLOCK)
    rest_feature = FIRST + tl.arange(0, REST_BLOCK)
    value_feature = tl.arange(0, VALUE_BLOCK)
    vectors = query + (token * query_stride + head * head_stride)[:, None]
    q = tl.load(vectors + feature[None, :], mask=exists[:, None] & (feature < FIRST)[None, :], other=0.0)
    if LATENT:
        rest_q = tl.load(
            vectors + rest_feature[None, :], mask=exists[:, None] & (rest_feature < SIZE)[None, :], other=0.0
        )
    trunk, branch, earliest, latest = visible(token, exists, positions, trunks, branches, reach, LIMITED, IN_CHUNKS)
    first_block = tl.minimum(tl.min(earliest), length - 1) // BLOCK
    end_block = tl.cdiv(tl.minimum(tl.max(latest), length), BLOCK)
    slot = tl.load(slots + row)
    # All tokens see the columns between these; tests of each would take as long as the rest.
    whole_from = tl.max(tl.where(exists, earliest, 0))
    whole_to = tl.min(tl.where(exists, trunk, length))

    # The blocks of parts `part`, `part + parts_apart`, …, numbered as if they were adjacent.
    PER_PART: tl.constexpr = PART // BLOCK
    parts_apart = tl.where(is_split != 0, tl.num_programs(2), 1)
    part = first_block // PER_PART
    part += (stride + parts_apart - part % parts_apart) % parts_apart
    first = tl.maximum(first_block - part * PER_PART, 0)
    last_part = part + (tl.cdiv(end_block, PER_PART) - 1 - part) // parts_apart * parts_apart
    end_of_blocks = (last_part - part) // parts_apart * PER_PART + tl.minimum(
        end_block - last_part * PER_PART, PER_PART
    )
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)  # of the part
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, VALUE_BLOCK], tl.float32)
    all_maximum = tl.full([QUERIES], float("-inf"), tl.float32)  # of the parts before
    all_weight = tl.zeros([QUERIES], tl.float32)
    all_total = tl.zeros([QUERIES, VALUE_BLOCK], tl.float32)
    for block in range(first, end_of_blocks):
        first_column = (part + block // PER_PART * parts_apart) * PART + block % PER_PART * BLOCK
        column = first_column + tl.arange(0, BLOCK)
        page = tl.load(tables + slot * table_width + column // PAGE, mask=column < length, other=0)
        page = page.to(tl.int64) * KV_HEADS + kv_head
        k = _load_keys(keys, page, column, feature, FIRST, q, PAGE, SIZE)  # [D, BLOCK]
        scores = tl.dot(q, k, input_precision="ieee")  # [Q, BLOCK] float32
        if LATENT:
            rest = _load_keys(keys, page, column, rest_feature, SIZE, q, PAGE, SIZE)
            scores = tl.dot(rest_q, rest, scores, input_precision="ieee")
            v = tl.where((column < length)[:, None], tl.trans(k), 0.0).to(k.dtype)  # [BLOCK, Dv]
        else:
            v = _load_values(values, page, column, length, value_feature, q, PAGE, VALUE_SIZE)
        scores = scores * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))  # softcap * tanh
        scores = scores * LOG2_E
        if (first_column < whole_from) | (first_column + BLOCK > whole_to):
            scores = tl.where(_sees(column, trunk, branch, earliest), scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(maximum - finite)
        weight = weight * faded + tl.sum(weights, 1)
        total = tl.dot(weights.to(v.dtype), v, total * faded[:, None], input_precision="ieee")
        maximum = new_maximum
        if (block % PER_PART == PER_PART - 1) | (block == end_of_blocks - 1):
            if is_split != 0:
                partial = entry + (token - start) * tl.cdiv(length, PART) + part + block // PER_PART * parts_apart
                store_part(
                    *(partial * HEADS + head, exists, maximum, weight, total),
                    *(partials, statistics, VALUE_SIZE, VALUE_BLOCK),
                )
            all_maximum, all_weight, all_total = merge(all_maximum, all_weight, all_total, maximum, weight, total)
            maximum = tl.full([QUERIES], float("-inf"), tl.float32)
            weight = tl.zeros([QUERIES], tl.float32)
            total = tl.zeros([QUERIES, VALUE_BLOCK], tl.float32)
    if is_split == 0:
        result = finish(all_maximum, all_weight, all_total, sinks, head, exists, HAS_SINKS)
        tl.store(
            output + ((token * HEADS + head) * VALUE_SIZE)[:, None] + value_feature[None, :],
            result.to(output.dtype.element_ty),
            mask=exists[:, None] & (value_feature < VALUE_SIZE)[None, :],
        )


@triton.jit
def _find_tile(
    tile: tl.tensor, offsets: tl.tensor, rows: tl.tensor, TOKENS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile's row, that row's first token and the one after its last, and the tile's first token."""
    index = tl.arange(0, ROWS)
    first_tiles = tl.load(offsets + index, mask=index < rows, other=0) // TOKENS + index  # [B]: upper bounds
    row = tl.sum(((first_tiles <= tile) & (index < rows)).to(tl.int32)) - 1
    start = tl.load(offsets + row)
    return row, start, tl.load(offsets + row + 1), start + (tile - start // TOKENS - row) * TOKENS


@triton.jit
def _load_keys(
    keys: tl.tensor,  # [pages, kv_heads, D, page]
    page: tl.tensor,  # [BLOCK] of each column, times the kv heads, and the head
    column: tl.tensor,  # [BLOCK]
    feature: tl.tensor,  # [D]
    end: tl.constexpr,  # of the features
    query: tl.tensor,  # an example of the type
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return some features of the keys of some columns, [D, BLOCK]."""
    first = tl.max_contiguous(tl.multiple_of(page * (SIZE * PAGE) + column % PAGE, PAGE), PAGE)
    return load_as(keys + first[None, :] + (feature * PAGE)[:, None], (feature < end)[:, None], query.dtype)


@triton.jit
def _load_values(
    values: tl.tensor,  # [pages, kv_heads, page, Dv]
    page: tl.tensor,  # [BLOCK] as in `_load_keys`
    column: tl.tensor,  # [BLOCK]
    length: tl.tensor,  # of the row, in columns
    feature: tl.tensor,  # [Dv]
    query: tl.tensor,
    PAGE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
) -> tl.tensor:
    """Return the values of some columns, [BLOCK, Dv]; 0 beyond the row's end, where NaN may lie."""
    first = page * (PAGE * VALUE_SIZE) + column % PAGE * VALUE_SIZE
    exists = (column < length)[:, None] & (feature < VALUE_SIZE)[None, :]
    return load_as(values + first[:, None] + feature[None, :], exists, query.dtype)


@triton.jit
def _sees(
    column: tl.tensor,  # [BLOCK]
    trunk: tl.tensor,  # [Q]
    branch: tl.tensor,  # [Q]
    earliest: tl.tensor,  # [Q]
) -> tl.tensor:
    """Return which tokens see which columns, [Q, BLOCK]: those of their text, and by a bit each those of their path."""
    beyond = column[None, :] - trunk[:, None]
    bit = (branch[:, None] >> tl.minimum(tl.maximum(beyond, 0), 63).to(tl.int64)) & 1
    in_text = (beyond < 0) & (column[None, :] >= earliest[:, None])
    return in_text | ((beyond >= 0) & (beyond < 64) & (bit == 1))
