"""Convolutions and recurrences of rows on CPUs: each channel or head on one thread, token by token."""

from typing import Any

import torch
from torch import Tensor

from engine.kernels import state as reference
from engine.kernels.native import KINDS, call, empty, library, structure
from engine.kernels.operator_trace import as_one_operator
from engine.kernels.state import Convolution, Recurrence

_ROWS = "*slots *offsets *columns *state_rows"
_ConvolveCall = structure(f"rows channels width silu threads *x *weight *bias *ring {_ROWS} *output")
_RecurCall = structure(
    "rows heads groups key_size value_size decays normalises threads "
    f"*query *key *value *decay *rates *beta *states *ring {_ROWS} *output .scale"
)


def convolve(args: Convolution) -> Tensor:
    """Return the convolution of each token with those before it, [N, D]. As in `state.convolve`."""
    return _convolve(*args)


def recur(args: Recurrence) -> Tensor:
    """Return the output after each token, [N, H, V] float32. As in `state.recur`."""
    return _recur(*args)


@as_one_operator  # a second call with the same arguments finds another state, so no recording can be checked
def _convolve(*given: Any) -> Tensor:
    args = Convolution._make(given)
    if args.x.is_cuda:
        from engine.kernels import triton_state

        return triton_state.convolve(args)
    x = args.x.contiguous()
    if x.device.type != "cpu" or x.dtype not in KINDS or library() is None:
        return reference.convolve(args)
    output = empty(*x.shape, dtype=x.dtype)
    arguments = _ConvolveCall(
        *(len(args.batch.slots), x.shape[1], args.weight.shape[1], args.silu, torch.get_num_threads()),
        *(x.data_ptr(), args.weight.data_ptr(), None if args.bias is None else args.bias.data_ptr()),
        *(args.ring.data_ptr(), *_addresses(args), output.data_ptr()),
    )
    call(f"convolve_{KINDS[x.dtype]}", arguments)
    return output


@as_one_operator
def _recur(*given: Any) -> Tensor:
    args = Recurrence._make(given)
    if args.value.is_cuda:
        from engine.kernels import triton_state

        return triton_state.recur(args)
    if args.value.device.type != "cpu" or library() is None:
        return reference.recur(args)
    heads, value_size = args.value.shape[1:]
    groups, key_size = args.key.shape[1:]
    output = empty(*args.value.shape, dtype=torch.float32)
    given = args.query, args.key, args.value, args.decay, args.rates, args.beta, args.states, args.ring
    arguments = _RecurCall(
        *(len(args.batch.slots), heads, groups, key_size, value_size, args.decay.shape[-1], args.normalises),
        torch.get_num_threads(),
        *(None if part is None else part.data_ptr() for part in given),
        *(*_addresses(args), output.data_ptr(), args.scale),
    )
    call("recur", arguments)
    return output


def _addresses(args: Convolution | Recurrence) -> list[int]:
    batch = args.batch
    return [part.data_ptr() for part in (batch.slots, batch.offsets, batch.columns, batch.states)]
