"""Activation functions on CPUs, with the same bits for a number wherever it stands.

torch's own kernels take vectors of numbers from where each thread begins, and the last few by another formula. Where a
thread begins depends on the number of tokens.
"""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.native.calls import call, empty, native_operator
from engine.model.native.elementwise import contiguous
from engine.model.native.library import library

_NAMES = {torch.float32: "activate_float32", torch.bfloat16: "activate_bfloat16"}
_MODULES = "transformers.activations", "torch.nn.modules.activation"
_TOLERANCE = 1e-5
# In the order of kernels/activation.cpp.
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.silu,
    partial(functional.gelu, approximate="tanh"),
    functional.gelu,
    lambda x: x * torch.sigmoid(1.702 * x),
)


class _Call(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("function", "rows", "size", "threads")),
        ("output", ctypes.c_void_p),
    ]


class NativeActivation(nn.Module):
    """Computes one of FUNCTIONS in float32, and rounds once."""

    def __init__(self, original: nn.Module, function: int) -> None:
        """
        original: the layer that this one replaces; it still computes inputs of another dtype.
        function: its index in FUNCTIONS.
        """
        super().__init__()
        self._original, self._function = original, function

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., I]; returns the same shape."""
        if x.dtype not in _NAMES or not x.numel():
            result: Tensor = self._original(x)
            return result
        return _activate(x, self._function)


@native_operator
def _activate(x: Tensor, function: int) -> Tensor:
    x = contiguous(x)
    output = empty(*x.shape, dtype=x.dtype)
    size = x.shape[-1]
    sizes = x.numel() // size, size, torch.get_num_threads()
    call(_NAMES[x.dtype], _Call(x.data_ptr(), function, *sizes, output.data_ptr()))
    return output


@torch.no_grad()
def replace_activations(module: nn.Module) -> None:
    """Replace the activation functions below `module` that are one of FUNCTIONS, if it is on a CPU."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type != "cpu" or library() is None:
        return
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            function = _function_of(child) if type(child).__module__ in _MODULES else None
            if function is not None:
                setattr(parent, name, NativeActivation(child, function))


def _function_of(activation: nn.Module) -> int | None:
    """Return which of FUNCTIONS a layer computes; None: another one."""
    x = torch.linspace(-12, 12, 4096)
    try:
        result = activation(x)
    except Exception:  # it takes other arguments
        return None
    for index, function in enumerate(FUNCTIONS):
        if isinstance(result, Tensor) and torch.allclose(result, function(x), rtol=_TOLERANCE, atol=_TOLERANCE):
            return index
    return None
