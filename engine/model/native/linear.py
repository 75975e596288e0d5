"""Linear layers on a CPU that read their weights at nearly the speed of memory, if there are few tokens.

Each result is one sum, in the order of the input features, so a token gets the same bits whatever runs beside it.
"""

import ctypes

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.model.native.calls import call, empty, native_operator
from engine.model.native.elementwise import contiguous
from engine.model.native.library import library

_FUNCTIONS = {  # by the dtypes of weights and results
    (torch.float32, torch.float32): "linear_float32",
    (torch.bfloat16, torch.bfloat16): "linear_bfloat16",
    (torch.bfloat16, torch.float32): "linear_bfloat16_to_float32",
}
_DEPTHS = {torch.float32: 1, torch.bfloat16: 2}  # input features that are multiplied at once


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "columns", "threads")),
        ("output", ctypes.c_void_p),
    ]


class NativeLinear(nn.Module):
    """A linear layer; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """weight: [out_features, in_features], see `has_kernel`; bias: [out_features].

        out_dtype: of the result: that of the weights, or float32.
        """
        super().__init__()
        native = library()
        assert native is not None
        columns, size = weight.shape
        panel, depth = native.linear_panel(), _DEPTHS[weight.dtype]
        padding = -columns % panel
        padded = pad(weight.detach(), (0, 0, 0, padding)) if padding else weight.detach()
        panels = padded.reshape(-1, panel, size // depth, depth)
        self.weight = panels.transpose(1, 2).contiguous()  # [panels, in_features / depth, panel, depth]
        self.bias = (
            weight.new_zeros(columns, dtype=torch.float32) if bias is None else bias.detach().float().contiguous()
        )
        self._out_dtype = out_dtype or weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features].

        x: [..., in_features], of the weights' dtype.

        Raises:
            ValueError: x has another dtype or another number of features.
        """
        return _multiply(x, self.weight, self.bias, self._out_dtype)


@native_operator
def _multiply(x: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype) -> Tensor:
    if x.dtype != weight.dtype or x.shape[-1] != weight.shape[1] * weight.shape[3]:
        features = weight.shape[1] * weight.shape[3]
        raise ValueError(f"inputs are {x.shape[-1]} features in {x.dtype}, not {features} in {weight.dtype}")
    columns = len(bias)
    x = contiguous(x)
    output = empty(*x.shape[:-1], columns, dtype=out_dtype)
    arguments = _Call(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr()),
        *(x.shape[:-1].numel(), x.shape[-1], columns, torch.get_num_threads()),
        output.data_ptr(),
    )
    call(_FUNCTIONS[x.dtype, out_dtype], arguments)
    return output


def has_kernel(weight: Tensor) -> bool:
    """Whether there is a fast function for such weights, [out_features, in_features], on this machine."""
    depth = _DEPTHS.get(weight.dtype)
    if weight.device.type != "cpu" or depth is None or weight.shape[1] % depth:
        return False
    native = library()
    return native is not None and native.linear_panel() > 0
