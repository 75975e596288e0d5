"""Layers that carry a state from token to token: causal convolutions and linear recurrences over ragged rows.

A row has a state, which covers the first columns of its text, and a ring of the inputs of its last columns. A step
starts from the state and replays the ring up to its own first column. So draft tokens are written to the ring only, and
a rejected draft costs no second forward. Tokens are processed one by one in float32, so a token's bits depend on its
text alone. This is the reference in plain torch, which runs where there is no kernel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention import RaggedBatch

RING = 32  # columns whose inputs are kept: it limits a draft's tokens plus the columns that a convolution looks back


class StateRow(NamedTuple):
    """Where a step reads a row's state and where it writes it. Cells: those of slots, then those of snapshots."""

    source: int  # the cell to read: a state, and the inputs of the columns after it
    held: int  # how many columns that state covers; 0: there is no state yet
    keep: int = -1  # the state after this many columns is written to the slot's cell; -1: none is
    snapshot_at: int = -1  # the state after this many columns is written to a snapshot; -1: none is
    snapshot: int = 0  # the snapshot's cell


class Convolution(NamedTuple):
    """Arguments of a depthwise causal convolution."""

    x: Tensor  # [N, D]
    weight: Tensor  # [D, W] in the type of x, the oldest input's first
    bias: Tensor | None  # [D] in the type of x
    ring: Tensor  # [cells, RING, D], of inputs, in the type of x
    batch: RaggedBatch
    silu: bool  # whether SiLU is applied to the result


class Recurrence(NamedTuple):
    """Arguments of a recurrence: S ← e^decay · S, S ← S + key ⊗ update, output = scale · query · S.

    The update is the value. With the delta rule (Yang et al., arXiv 2412.06464, equation 10) it is
    beta · (value - key · S). A head's decay is one number, or one per row of S (Kimi Team, arXiv 2510.26692). With
    rates it is one per column, which each element multiplies by its own rate: Mamba 1 (Gu and Dao, arXiv 2312.00752),
    as a single head whose values are the channels.
    """

    query: Tensor  # [N, G, K] float32; head h has the query and the key of group h · G / H
    key: Tensor  # [N, G, K] float32
    value: Tensor  # [N, H, V] float32
    decay: Tensor  # [N, H, 1] float32, or [N, H, K]; [N, H, V] with rates
    rates: Tensor | None  # [H, K, V] float32; None: there are none
    beta: Tensor | None  # [N, H] float32; None: no delta rule
    states: Tensor  # [cells, H, K, V] float32
    ring: Tensor  # [cells, RING, ·] float32: keys, values, decays, betas
    batch: RaggedBatch
    normalises: bool  # whether queries and keys are scaled to length 1
    scale: float


def state_rows(batch: RaggedBatch) -> list[StateRow]:
    """Return the rows of a batch, [B]."""
    return [StateRow(*row) for row in batch.states.view(-1, len(StateRow._fields)).tolist()]


def convolve(args: Convolution) -> Tensor:
    """Return each token convolved with those before it, [N, D], and write the last columns' inputs to the rings."""
    width, weight = args.weight.shape[1], args.weight.float()
    output = torch.empty_like(args.x)
    for row, slot, first, end, start in _rows(args.batch):
        past = range(max(0, start - width + 1), start)
        before = args.ring[row.source, [column % RING for column in past]]
        missing = args.x.new_zeros(width - 1 - len(past), args.x.shape[1])
        inputs = torch.cat([missing, before, args.x[first:end]]).float()
        result = torch.zeros_like(inputs[width - 1 :])
        for tap in range(width):
            result = result + inputs[tap : tap + end - first] * weight[:, tap]
        if args.bias is not None:
            result = result + args.bias.float()
        output[first:end] = (result * torch.sigmoid(result) if args.silu else result).to(output.dtype)
        known = inputs[width - 1 - len(past) :].to(args.ring.dtype)
        _keep(args.ring[slot], known, past.start, start + end - first)
        if row.snapshot_at >= 0:
            _keep(args.ring[row.snapshot], known, past.start, row.snapshot_at)
    return output


def recur(args: Recurrence) -> Tensor:
    """Return the output after each token, [N, H, V] float32, and write states and rings."""
    output = torch.empty_like(args.value)
    beta = args.decay.new_ones(args.decay.shape[:2]) if args.beta is None else args.beta
    inputs = torch.cat([part.flatten(1) for part in (args.key, args.value, args.decay, beta)], dim=1)
    for row, slot, first, end, start in _rows(args.batch):
        columns = [column % RING for column in range(row.held, start)]
        known = torch.cat([args.ring[row.source, columns], inputs[first:end]])
        state = args.states[row.source].clone() if row.held else torch.zeros_like(args.states[0])
        for column, packed in enumerate([*known, None], row.held):
            if column == row.keep:
                args.states[slot] = state
            if column == row.snapshot_at:
                args.states[row.snapshot] = state
            if packed is None:
                break
            state = _updated(args, state, packed)
            if column >= start:
                query = _per_head(args, args.query[first + column - start])
                output[first + column - start] = (query[:, None] @ state)[:, 0] * args.scale
        _keep(args.ring[slot], known, row.held, start + end - first)
        if row.snapshot_at >= 0:
            _keep(args.ring[row.snapshot], known, row.held, row.snapshot_at)
    return output


def _updated(args: Recurrence, state: Tensor, packed: Tensor) -> Tensor:
    """Return the state after one more token, [H, K, V]. packed: its inputs, as in the ring."""
    heads, width = args.value.shape[1:]
    sizes = args.key[0].numel(), heads * width, args.decay[0].numel(), heads
    key, value, decay, beta = packed.split(sizes)
    key, value = _per_head(args, key.view_as(args.key[0])), value.view(heads, width)
    decay = decay.view_as(args.decay[0])
    state = state * (decay[..., None] if args.rates is None else decay[:, None] * args.rates).exp()
    if args.beta is not None:
        value = (value - (key[:, None] @ state)[:, 0]) * beta[:, None]
    state += key[:, :, None] * value[:, None]
    return state


def _per_head(args: Recurrence, groups: Tensor) -> Tensor:
    """Return a token's queries or keys by head, [H, K]. groups: [G, K]."""
    if args.normalises:
        groups = groups * torch.rsqrt(groups.square().sum(dim=-1, keepdim=True) + 1e-6)
    return groups.repeat_interleave(args.value.shape[1] // len(groups), dim=0)


def _rows(batch: RaggedBatch) -> list[tuple[StateRow, int, int, int, int]]:
    """Return the rows with tokens: each with its slot, its first token, the end of its tokens, and its first column."""
    offsets = batch.offsets.tolist()
    rows = zip(state_rows(batch), batch.slots.tolist(), offsets, offsets[1:], strict=False)
    return [(*row, int(batch.columns[row[2]])) for row in rows if row[3] > row[2]]


def _keep(ring: Tensor, inputs: Tensor, first: int, end: int) -> None:
    """Write the inputs of columns first … end - 1 to a ring, or only the last RING of them."""
    for column in range(max(first, end - RING), end):
        ring[column % RING] = inputs[column - first]
