"""Attention of few tokens per row over KV slots, on CPUs.

torch's attention for CPUs is made for long queries. It is slow for the few tokens of decoding and verification
(docs/experiments.md).
"""

import ctypes

import torch
from torch import Tensor

from actors.model.native.library import library
from actors.model.slot_batch import SlotBatch

MAX_WIDTH = 32  # tokens per row; with more, as in prompts, torch is faster
_NAMES = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("rows", "heads", "kv_heads", "head_dim", "capacity", "width", "length", "threads"),
            *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
        )
    ]


def can_attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> bool:
    """Whether `attend` takes these: on a CPU, few tokens per row, one dtype, one head size, and a compiler."""
    return (
        query.device.type == "cpu"
        and mask.shape[1] <= MAX_WIDTH
        and query.dtype in _NAMES
        and {states.dtype for states in (key, value, keys, values, mask)} == {query.dtype}
        and query.shape[-1] == value.shape[-1]
        and library() is not None
    )


def attend(
    query: Tensor,  # [1, heads, N, head_dim]
    key: Tensor,  # [1, kv_heads, N, head_dim]
    value: Tensor,
    keys: Tensor,  # [slots + 1, kv_heads, capacity, head_dim]
    values: Tensor,
    batch: SlotBatch,
    mask: Tensor,  # [B, Q, L]
    scale: float,
) -> Tensor:
    """Write the new keys and values to their slots, then attend to the columns of each row: [1, N, heads, head_dim]."""
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    _, heads, tokens, head_dim = query.shape
    output = query.new_empty(1, tokens, heads, head_dim)
    shape = _Shape(
        *(len(batch.rows), heads, key.shape[1], head_dim, keys.shape[2], *mask.shape[1:], torch.get_num_threads()),
        *(states.stride(axis) for states in (query, key, value) for axis in (2, 1)),
    )
    tensors = (query, key, value, keys, values, *batch[:5], mask)
    native = library()
    assert native is not None
    function = getattr(native, _NAMES[query.dtype])
    function(ctypes.byref(shape), *(tensor.data_ptr() for tensor in tensors), scale, output.data_ptr())
    return output
