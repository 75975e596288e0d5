"""Attention over pages on CPUs, for decoding, verification and prompts.

The C++ function reads pages in place, each row at its own length. A token's result has the same bits whatever is
computed beside it, and in whichever columns its path lies.
"""

import ctypes

import torch
from torch import Tensor

from engine.model.attention import reference
from engine.model.native.calls import call, empty
from engine.model.native.library import library
from engine.model.ragged_batch import RaggedBatch

_PAGE_SIZE = 16
_NUMBERS = {  # of `Number` in vectors.h
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
_NO_WINDOW = 2**62


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "key_dim", "value_dim", "table_width")),
        *((name, ctypes.c_int64) for name in ("window", "threads", "writes", "number", "page_number")),
        *((f"{part}_{axis}", ctypes.c_int64) for part in ("query", "key", "value") for axis in ("token", "head")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "tables")),
        *((name, ctypes.c_void_p) for name in ("slots", "offsets", "columns", "positions", "row_of", "trunks")),
        *((name, ctypes.c_void_p) for name in ("branches", "sinks", "output")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def can_attend(query: Tensor, keys: Tensor) -> bool:
    """Whether `attend` takes these: on a CPU with a compiler, numbers of these types, and pages of 16 columns."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and keys.dtype in _NUMBERS
        and keys.shape[-1] == _PAGE_SIZE
        and library() is not None
    )


def attend(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [N, kv_heads, D]
    value: Tensor,  # [N, kv_heads, Dv]
    keys: Tensor,  # [pages, kv_heads, D, page_size]
    values: Tensor,  # [pages, kv_heads, page_size, Dv]
    tables: Tensor,  # [slots + 1, P] int32
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, Dv]. As in `reference.attend`."""
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    writes = {query.dtype, key.dtype, value.dtype} == {keys.dtype}
    if not writes:
        reference.write(key, value, keys, values, tables, batch)
    sinks = None if sinks is None else sinks.float()
    output = empty(*query.shape[:2], values.shape[-1], dtype=query.dtype)
    branches = batch.branches if window is None else batch.window_branches
    layout = batch.slots, batch.offsets, batch.columns, batch.positions
    arguments = _Call(
        *(len(batch.slots), query.shape[1], *keys.shape[1:3], values.shape[-1], tables.shape[1]),
        *(_NO_WINDOW if window is None else window, torch.get_num_threads()),
        *(writes, _NUMBERS[query.dtype], _NUMBERS[keys.dtype]),
        *(states.stride(axis) for states in (query, key, value) for axis in (0, 1)),
        *(tensor.data_ptr() for tensor in (query, key, value, keys, values, tables, *layout, batch.row_of)),
        *(batch.trunks.data_ptr(), branches.data_ptr(), None if sinks is None else sinks.data_ptr(), output.data_ptr()),
        *(scale, softcap or 0.0),
    )
    call("attend", arguments)
    return output
