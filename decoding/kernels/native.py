"""The C++ functions of this folder, for CPUs. Penalties on tokens are here, the others in files of their own."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from decoding.kernels import compiler

# Every product and sum is rounded by itself, as in torch, and −∞ is a number.
_MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_pointer, _size = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "choose_step": [_pointer],
    "choose_tokens": [*[_pointer] * 3, *[_size] * 4, *[_pointer] * 2],
    "penalise": [_pointer, *[_size] * 2, *[_pointer] * 5, _size, _pointer],
    "matches_make": [_size, _size],
    "matches_free": [_pointer],
    "matches_add": [_pointer, _size, _pointer, _size],
    "matches_find": [_pointer, _size, _pointer, *[_size] * 2, *[_pointer] * 2],
    "restore": [_pointer, *[_size] * 2, *[_pointer] * 3, _size, _pointer],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions; None if they can't be built."""
    loaded = compiler.load(Path(__file__).parent, _MATHS)
    for name, arguments in _ARGUMENTS.items() if loaded is not None else ():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _pointer if name == "matches_make" else None
    return loaded


def penalise_(logits: Tensor, shape: Tensor, tokens: Tensor, counts: Tensor, settings: Tensor, total: int) -> Tensor:
    """Change logits in place. Returns the values before, [E] float32, row after row.

    logits: [N, V] float32, contiguous.
    shape: [2, N] int64: how many of the tokens belong to each row, and the first of them.
    tokens: [U] int64
    counts: [U] float32, of each token in the answer.
    settings: [3, N] float32: repetition, frequency and presence penalty.
    total: E, the sum of shape[0].
    """
    native = library()
    assert native is not None
    before = torch.empty(total)
    inputs = [part.data_ptr() for part in (shape[0], shape[1], tokens, counts, settings)]
    native.penalise(logits.data_ptr(), *logits.shape, *inputs, torch.get_num_threads(), before.data_ptr())
    return before


def restore_(logits: Tensor, shape: Tensor, tokens: Tensor, before: Tensor) -> None:
    """Undo `penalise_`."""
    native = library()
    assert native is not None
    inputs = [part.data_ptr() for part in (shape[0], shape[1], tokens)]
    native.restore(logits.data_ptr(), *logits.shape, *inputs, torch.get_num_threads(), before.data_ptr())
