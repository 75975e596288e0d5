"""Convolutions and recurrences of rows in Triton: some channels, or some columns of a head's state, token by token.

Arguments and results are those of `engine/kernels/state.py`. Each program goes through its row alone and in order, so a
token's bits depend on its text alone. Rows, lengths and cells are read on the GPU, as CUDA graphs need.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.state import RING, Convolution, Recurrence

_CHANNELS = 128  # of a program of `_convolve`
_ELEMENTS = 2048  # of a state, in a program's registers
_COPIED = 1024  # numbers at a time
_ONE, _PER_ROW, _RATES = range(3)  # kinds of decays


def convolve(args: Convolution) -> Tensor:
    """Return each token convolved with those before it, [N, D], and write the rings. As in `state.convolve`."""
    x, batch = args.x.contiguous(), args.batch
    output = torch.empty_like(x)
    channels, width = args.weight.shape
    with torch.cuda.device_of(x):
        _convolve[(len(batch.slots), triton.cdiv(channels, _CHANNELS))](
            *(x, args.weight, args.weight if args.bias is None else args.bias, args.ring),
            *(batch.slots, batch.offsets, batch.columns, batch.states, output, channels),
            HAS_BIAS=args.bias is not None,
            SILU=args.silu,
            WIDTH=width,
            RING=RING,
            BLOCK=_CHANNELS,
            enable_fp_fusion=False,
        )
    return output


def recur(args: Recurrence) -> Tensor:
    """Return the output after each token, [N, H, V] float32, and write states and rings. As in `state.recur`."""
    batch, value = args.batch, args.value
    output = torch.empty_like(value)
    (groups, key_size), (heads, value_size) = args.key.shape[1:], value.shape[1:]
    rates, beta = (args.decay if part is None else part for part in (args.rates, args.beta))
    rows = batch.slots, batch.offsets, batch.columns, batch.states
    key_block = triton.next_power_of_2(key_size)
    value_block = min(triton.next_power_of_2(value_size), max(_ELEMENTS // key_block, 16))
    with torch.cuda.device_of(value):
        _recur[(len(batch.slots), heads, triton.cdiv(value_size, value_block))](
            *(args.query, args.key, value, args.decay, rates, beta, args.states, args.ring, *rows, output),
            *(heads, groups, key_size, value_size, args.decay.shape[-1], args.scale),
            DECAY=_RATES if args.rates is not None else _ONE if args.decay.shape[-1] == 1 else _PER_ROW,
            DELTA=args.beta is not None,
            NORMALISES=args.normalises,
            RING=RING,
            KEY_BLOCK=key_block,
            VALUE_BLOCK=value_block,
            enable_fp_fusion=False,
        )
        _store_inputs[(len(batch.slots), RING)](
            *(args.key, value, args.decay, beta, args.ring, *rows),
            *(groups * key_size, heads * value_size, heads * args.decay.shape[-1], heads),
            DELTA=args.beta is not None,
            RING=RING,
            BLOCK=_COPIED,
        )
    return output


@triton.jit
def _load(is_new: tl.tensor, new: tl.tensor, known: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load from the new tokens' inputs, or from a ring."""
    return tl.where(is_new, tl.load(new, mask=mask & is_new, other=0.0), tl.load(known, mask=mask & ~is_new, other=0.0))


@triton.jit
def _convolve(
    x: tl.tensor,  # [N, D]
    weight: tl.tensor,  # [D, W]
    bias: tl.tensor,  # [D]
    ring: tl.tensor,  # [cells, RING, D]
    slots: tl.tensor,  # [B], and so on: a batch's
    offsets: tl.tensor,
    columns: tl.tensor,
    states: tl.tensor,
    output: tl.tensor,  # [N, D]
    channels: tl.tensor,  # D
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convolve some channels of one row. The grid is [B, blocks of channels]."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < channels
    slot, first = tl.load(slots + row), tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    start = tl.load(columns + first, mask=count > 0, other=0)
    end = start + count
    source, snapshot_at, snapshot = (
        tl.load(states + 5 * row),
        tl.load(states + 5 * row + 3),
        tl.load(states + 5 * row + 4),
    )
    for column in range(start, end):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            seen = column - (WIDTH - 1) + tap
            value = _load(
                seen >= start,
                x + (first + seen - start) * channels + channel,
                ring + (source * RING + (seen + RING) % RING) * channels + channel,
                exists & (seen >= 0),
            )
            total += value.to(tl.float32) * tl.load(weight + channel * WIDTH + tap, mask=exists, other=0.0).to(
                tl.float32
            )
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(0.0 - total))
        target = output + (first + column - start) * channels + channel
        tl.store(target, total.to(output.dtype.element_ty), mask=exists)
    tl.debug_barrier()  # what follows writes where other threads may still read
    oldest = tl.maximum(start - (WIDTH - 1), 0)
    for column in range(tl.maximum(oldest, snapshot_at - RING), snapshot_at):
        value = _load(
            column >= start,
            x + (first + column - start) * channels + channel,
            ring + (source * RING + column % RING) * channels + channel,
            exists,
        )
        tl.store(ring + (snapshot * RING + column % RING) * channels + channel, value, mask=exists & (count > 0))
    tl.debug_barrier()
    for column in range(tl.maximum(oldest, end - RING), end):
        value = _load(
            column >= start,
            x + (first + column - start) * channels + channel,
            ring + (source * RING + column % RING) * channels + channel,
            exists & ((column >= start) | (source != slot)),
        )
        target = ring + (slot * RING + column % RING) * channels + channel
        tl.store(target, value, mask=exists & (count > 0) & ((column >= start) | (source != slot)))


@triton.jit
def _recur(
    query: tl.tensor,  # [N, G, K]
    key: tl.tensor,  # [N, G, K]
    value: tl.tensor,  # [N, H, V]
    decay: tl.tensor,  # [N, H, decays]
    rates: tl.tensor,  # [H, K, V]
    beta: tl.tensor,  # [N, H]
    states: tl.tensor,  # [cells, H, K, V]
    ring: tl.tensor,  # [cells, RING, inputs]
    slots: tl.tensor,  # [B], and so on: a batch's
    offsets: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,  # [N, H, V]
    heads: tl.tensor,  # H
    groups: tl.tensor,  # G
    key_size: tl.tensor,  # K
    value_size: tl.tensor,  # V
    decays: tl.tensor,  # of a head
    scale: tl.tensor,
    DECAY: tl.constexpr,  # 0: one of a head, 1: one of each row of a state, 2: with rates
    DELTA: tl.constexpr,
    NORMALISES: tl.constexpr,
    RING: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Update some columns of one head's state with one row's tokens. The grid is [B, H, blocks of columns]."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, KEY_BLOCK)[:, None]
    j = (tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK))[None, :]
    is_row, is_column = i < key_size, j < value_size
    slot, first = tl.load(slots + row), tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    source, held, keep = tl.load(rows + 5 * row), tl.load(rows + 5 * row + 1), tl.load(rows + 5 * row + 2)
    snapshot_at, snapshot = tl.load(rows + 5 * row + 3), tl.load(rows + 5 * row + 4)
    start = tl.load(columns + first, mask=count > 0, other=0)
    end = tl.where(count > 0, start + count, held)
    group = head * groups // heads
    keys, values = groups * key_size, heads * value_size
    inputs = keys + values + heads * decays + heads
    size = key_size * heads * value_size
    addresses = states + (head * key_size + i) * value_size + j
    inside = is_row & is_column
    state = tl.load(addresses + source * size, mask=inside & (held > 0), other=0.0)
    if DECAY == 2:
        rate = tl.load(rates + (head * key_size + i) * value_size + j, mask=inside, other=0.0)
    for column in range(held, end):
        tl.store(addresses + slot * size, state, mask=inside & (column == keep))
        tl.store(addresses + snapshot * size, state, mask=inside & (column == snapshot_at))
        is_new = column >= start
        token = first + column - start
        packed = ring + (source * RING + column % RING) * inputs
        k = _load(is_new, key + (token * groups + group) * key_size + i, packed + group * key_size + i, is_row)
        v = _load(
            is_new, value + (token * heads + head) * value_size + j, packed + keys + head * value_size + j, is_column
        )
        new_decay, known_decay = decay + (token * heads + head) * decays, packed + keys + values + head * decays
        if DECAY == 0:
            state = state * tl.exp(_load(is_new, new_decay, known_decay, column >= held))
        elif DECAY == 1:
            state = state * tl.exp(_load(is_new, new_decay + i, known_decay + i, is_row))
        else:
            state = state * tl.exp(rate * _load(is_new, new_decay + j, known_decay + j, is_column))
        if NORMALISES:
            k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        if DELTA:
            b = _load(
                is_new, beta + token * heads + head, packed + keys + values + heads * decays + head, column >= held
            )
            v = (v - tl.sum(state * k, axis=0)[None, :]) * b
        state = state + k * v
        q = tl.load(query + (token * groups + group) * key_size + i, mask=is_row & is_new, other=0.0)
        if NORMALISES:
            q = q / tl.sqrt(tl.sum(q * q) + 1e-6)
        result = tl.sum(state * q, axis=0)[None, :] * scale
        tl.store(output + (token * heads + head) * value_size + j, result, mask=is_column & is_new)
    tl.store(addresses + slot * size, state, mask=inside & (end == keep) & (count > 0))
    tl.store(addresses + snapshot * size, state, mask=inside & (end == snapshot_at) & (count > 0))


@triton.jit
def _store_inputs(
    key: tl.tensor,  # [N, keys]
    value: tl.tensor,  # [N, values]
    decay: tl.tensor,  # [N, decays]
    beta: tl.tensor,  # [N, betas]
    ring: tl.tensor,  # [cells, RING, keys + values + decays + betas]
    slots: tl.tensor,  # [B], and so on: a batch's
    offsets: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    betas: tl.tensor,
    DELTA: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the inputs of one column to one row of the rings: first of the snapshot's, then of the slot's.

    The grid is [B, RING]. No other program reads or writes that row.
    """
    row, index = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(slots + row), tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    source, held = tl.load(rows + 5 * row), tl.load(rows + 5 * row + 1)
    snapshot_at, snapshot = tl.load(rows + 5 * row + 3), tl.load(rows + 5 * row + 4)
    start = tl.load(columns + first, mask=count > 0, other=0)
    inputs = keys + values + decays + betas
    known = ring + (source * RING + index) * inputs
    for is_slot in tl.static_range(2):
        limit = tl.where(is_slot == 1, start + count, snapshot_at)
        column = limit - 1 - (limit - 1 - index + 2 * RING) % RING
        is_new = column >= start
        wanted = (count > 0) & (column >= held) & (limit > 0) & (is_new | (is_slot == 0) | (source != slot))
        token = tl.where(is_new, first + column - start, 0)
        to = ring + (tl.where(is_slot == 1, slot, snapshot) * RING + index) * inputs
        _copy(key + token * keys, known, to, keys, is_new, wanted, True, BLOCK)
        _copy(value + token * values, known + keys, to + keys, values, is_new, wanted, True, BLOCK)
        rest = keys + values
        _copy(decay + token * decays, known + rest, to + rest, decays, is_new, wanted, True, BLOCK)
        rest += decays
        _copy(beta + token * betas, known + rest, to + rest, betas, is_new, wanted, DELTA, BLOCK)
        tl.debug_barrier()


@triton.jit
def _copy(
    new: tl.tensor,
    known: tl.tensor,
    to: tl.tensor,
    size: tl.tensor,
    is_new: tl.tensor,
    wanted: tl.tensor,
    EXISTS: tl.constexpr,  # whether there are new values; else ones are written
    BLOCK: tl.constexpr,
) -> None:
    for begin in range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        mask = (index < size) & wanted
        if EXISTS:
            tl.store(to + index, _load(is_new, new + index, known + index, mask), mask=mask)
        else:
            tl.store(to + index, tl.full([BLOCK], 1.0, tl.float32), mask=mask)
