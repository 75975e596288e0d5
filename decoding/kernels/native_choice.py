"""The fused choice of tokens on CPUs, in C++."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from decoding.kernels import compiler

# Every product and sum is rounded by itself, as in torch, and −∞ is a number.
_MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the C++ functions of this folder; None if they can't be built."""
    loaded = compiler.load(Path(__file__).parent, _MATHS)
    if loaded is not None:
        loaded.choose_tokens.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 2]
        loaded.choose_tokens.restype = None
    return loaded


def choose_tokens(logits: Tensor, settings: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do what `Choose` says, on a CPU."""
    native = library()
    assert native is not None
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, count, dtype=torch.int64)
    scores = torch.empty(rows, count)
    native.choose_tokens(
        logits.data_ptr(),
        settings.contiguous().data_ptr(),
        rows,
        vocab_size,
        count,
        torch.get_num_threads(),
        tokens.data_ptr(),
        scores.data_ptr(),
    )
    return tokens, scores
