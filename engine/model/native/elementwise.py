"""Sums and copies as native functions, so that they can be replayed."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from engine.model.native.calls import call, empty, is_recording

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MOST_DIMENSIONS = 4


class _AddCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("left", "right")),
        *((name, ctypes.c_int64) for name in ("size", "threads")),
        ("output", ctypes.c_void_p),
    ]


class _CopyCall(ctypes.Structure):
    _fields_ = [
        ("from", ctypes.c_void_p),
        *((name, ctypes.c_int64 * (_MOST_DIMENSIONS - 1)) for name in ("sizes", "strides")),
        ("size", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    ]


def add(left: Tensor, right: Any) -> Tensor:
    """Like `torch.add`, which is called where no native function fits."""
    alike = isinstance(right, Tensor) and left.shape == right.shape and left.dtype == right.dtype
    if not alike or left.dtype not in _TYPES or not left.is_contiguous() or not right.is_contiguous():
        result: Tensor = torch.add(left, right)
        return result
    output = empty(*left.shape, dtype=left.dtype)
    addresses = left.data_ptr(), right.data_ptr()
    arguments = _AddCall(*addresses, left.numel(), torch.get_num_threads(), output.data_ptr())
    call(f"add_{_TYPES[left.dtype]}", arguments)
    return output


def contiguous(x: Tensor) -> Tensor:
    """Like `x.contiguous()`; native in recordings, where possible."""
    copies = is_recording() and not x.is_contiguous()
    if not copies or x.dtype not in _TYPES or x.stride(-1) != 1 or x.dim() > _MOST_DIMENSIONS:
        return x.contiguous()
    missing = _MOST_DIMENSIONS - x.dim()
    output = empty(*x.shape, dtype=x.dtype)
    sizes, strides = [1] * missing + list(x.shape[:-1]), [0] * missing + list(x.stride()[:-1])
    three = ctypes.c_int64 * (_MOST_DIMENSIONS - 1)
    call(
        f"copy_{_TYPES[x.dtype]}",
        _CopyCall(x.data_ptr(), three(*sizes), three(*strides), x.shape[-1], output.data_ptr()),
    )
    return output
