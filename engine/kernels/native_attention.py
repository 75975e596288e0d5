"""Attention over pages on CPUs, for decoding, verification and prompts.

The C++ function reads pages in place, each row at its own length. A token's result has the same bits whatever is
computed beside it, and in whichever columns its path lies.
"""

import torch
from torch import Tensor

from engine.kernels.attention import AttentionArgs, Reach, write
from engine.kernels.native import call, empty, library, structure

_PAGE_SIZE = 16
_NUMBERS = {  # of `Number` in vectors.h
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
_ALL = Reach(2**62)


_Call = structure(
    "rows heads kv_heads key_dim value_dim table_width reach in_chunks threads writes number page_number "
    "query_token query_head key_token key_head value_token value_head *query *key *value *keys *values *tables "
    "*slots *offsets *columns *positions *row_of *trunks *branches *sinks *output .scale .softcap"
)


def can_attend(args: AttentionArgs) -> bool:
    """Whether `attend` takes these: on a CPU with a compiler, numbers of these types, and pages of 16 columns."""
    return (
        args.query.device.type == "cpu"
        and args.query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and args.keys.dtype in _NUMBERS
        and args.keys.shape[-1] == _PAGE_SIZE
        and library() is not None
    )


def attend(args: AttentionArgs) -> Tensor:
    """Write the new keys and values to their pages, then attend: [N, heads, Dv]. As in `attention.attend`."""
    states = [state if state.stride(-1) == 1 else state.contiguous() for state in args[:3]]
    query, keys, values, batch = states[0], args.keys, args.values, args.batch
    writes = all(state.dtype == keys.dtype for state in states)
    if not writes:
        write(args)
    sinks = None if args.sinks is None else args.sinks.float()
    output = empty(*query.shape[:2], args.value_size, dtype=query.dtype)
    layout = batch.slots, batch.offsets, batch.columns, batch.positions, batch.row_of, batch.trunks, args.branches
    arguments = _Call(
        *(len(batch.slots), query.shape[1], *keys.shape[1:3], args.value_size, args.tables.shape[1]),
        *(*(args.reach or _ALL), torch.get_num_threads()),
        *(writes, _NUMBERS[query.dtype], _NUMBERS[keys.dtype]),
        *(state.stride(axis) for state in states for axis in (0, 1)),
        *(*(state.data_ptr() for state in states), keys.data_ptr(), None if values is None else values.data_ptr()),
        *(tensor.data_ptr() for tensor in (args.tables, *layout)),
        *(None if sinks is None else sinks.data_ptr(), output.data_ptr()),
        *(args.scale, args.softcap or 0.0),
    )
    call("attend", arguments)
    return output
