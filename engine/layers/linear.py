"""Linear layers whose weights are laid out once, at loading.

Each kind of weights has a class, which `faster_linear` chooses. On CPUs our own kernels compute them (`NativeLinear`;
integers: engine/layers/quantized_linear.py), and oneDNN (`PackedLinear`) where there is no compiler for ours: torch's
own `linear` reads weights at little more than half the speed of memory (docs/experiments.md). On GPUs sums have a fixed
order (`FixedOrderLinear`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from engine.kernels.native import call, contiguous, empty, library, native_operator, structure
from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.onednn_linear import PackedLinear, onednn_computes
from engine.layers.quantized_linear import quantized_kernel

_FIXED_ORDER_DEVICE = "cuda"  # tests put the interpreter's here
_FIXED_ORDER_DTYPES = (torch.bfloat16, torch.float16)
_FUNCTIONS = {  # native ones, by the dtypes of weights and results
    (torch.float32, torch.float32): "linear_float32",
    (torch.bfloat16, torch.bfloat16): "linear_bfloat16",
    (torch.bfloat16, torch.float32): "linear_bfloat16_to_float32",
}
_DEPTHS = {torch.float32: 1, torch.bfloat16: 2}  # input features that they multiply at once


def has_fixed_order(weight: Tensor) -> bool:
    """Whether layers of fixed order run on the device of the weights and in their dtype."""
    return weight.device.type == _FIXED_ORDER_DEVICE and weight.dtype in _FIXED_ORDER_DTYPES


class FixedOrderLinear(nn.Module):
    """A linear layer, or one for each of H heads, that gives a token the same bits however many run beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """
        weight: [out_features, in_features] or [H, out_features, in_features].
        bias: [out_features].
        out_dtype: of the result; None: the input's.
        """
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self._out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] or [..., H, in_features]; returns [..., out_features] or [..., H, out_features]."""
        from engine.kernels.triton_linear import fixed_order_linear

        return fixed_order_linear(x, self.weight, self.bias, self._out_dtype)


_Multiplication = structure("*x *weight *bias rows heads size columns threads *output")


class NativeLinear(nn.Module):
    """A linear layer, or one for each of H heads; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """
        weight: [out_features, in_features] or [H, out_features, in_features], see `has_kernel`.
        bias: [out_features].
        out_dtype: of the result: that of the weights, or float32.
        """
        super().__init__()
        native = library()
        assert native is not None
        columns, size = weight.shape[-2:]
        panel, depth = native.linear_panel(), _DEPTHS[weight.dtype]
        padding = -columns % panel
        padded = pad(weight.detach(), (0, 0, 0, padding)) if padding else weight.detach()
        panels = padded.reshape(-1, panel, size // depth, depth)
        self.weight = panels.transpose(1, 2).contiguous()  # [panels, in_features / depth, panel, depth]
        self.bias = (
            weight.new_zeros(columns, dtype=torch.float32) if bias is None else bias.detach().float().contiguous()
        )
        self._out_dtype = out_dtype or weight.dtype
        self._heads = weight.shape[0] if weight.dim() == 3 else 1

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features], with H before that if the layer has heads.

        x: [..., in_features], or [..., H, in_features], of the weights' dtype.

        Raises ValueError if x has another dtype or another number of features.
        """
        return _multiply(x, self.weight, self.bias, self._out_dtype, self._heads)


@native_operator
def _multiply(x: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, heads: int) -> Tensor:
    if x.dtype != weight.dtype or x.shape[-1] != weight.shape[1] * weight.shape[3]:
        features = weight.shape[1] * weight.shape[3]
        raise ValueError(f"inputs are {x.shape[-1]} features in {x.dtype}, not {features} in {weight.dtype}")
    columns = len(bias)
    x = contiguous(x)
    output = empty(*x.shape[:-1], columns, dtype=out_dtype)
    arguments = _Multiplication(
        *(x.data_ptr(), weight.data_ptr(), bias.data_ptr()),
        *(x.shape[:-1].numel() // heads, heads, x.shape[-1], columns, torch.get_num_threads()),
        output.data_ptr(),
    )
    call(_FUNCTIONS[x.dtype, out_dtype], arguments)
    return output


def has_kernel(weight: Tensor) -> bool:
    """Whether there is a fast function for such weights, [..., out_features, in_features], on this machine."""
    depth = _DEPTHS.get(weight.dtype)
    if weight.device.type != "cpu" or depth is None or weight.shape[-1] % depth:
        return False
    native = library()
    return native is not None and native.linear_panel() > 0


class JoinedLinear(nn.Module):
    """Several linear layers as one, computed by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return linear(x, self.weight, self.bias)


class LinearHeads(nn.Module):
    """A linear layer for each of H heads."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H, in_features]; returns [..., H, out_features]."""
        return torch.stack([layer(x[..., head, :]) for head, layer in enumerate(self.layers)], dim=-2)


def make_head_linears(weight: Tensor, *, deterministic: bool = True) -> nn.Module:
    """Return fast linear layers for H heads. weight: [H, out_features, in_features]."""
    if deterministic and has_fixed_order(weight):
        return FixedOrderLinear(weight, None)
    if has_kernel(weight):
        return NativeLinear(weight, None)
    return LinearHeads([make_linear(part, deterministic=deterministic) for part in weight])


def make_linear(
    weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, deterministic: bool = True
) -> nn.Module:
    """Return a layer of these weights, [out_features, in_features], that is fast on their device."""
    faster = faster_linear(weight, bias, deterministic)
    if faster is not None:
        return faster
    assert isinstance(weight, Tensor)
    return JoinedLinear(weight, bias)


def faster_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None, deterministic: bool) -> nn.Module | None:
    """Return a layer for the device of the weights, [out_features, in_features]; None: torch's own is as good."""
    if isinstance(weight, QuantizedWeight):
        kind = quantized_kernel(weight)
        return None if kind is None else kind(weight, bias)
    if deterministic and has_fixed_order(weight):
        return FixedOrderLinear(weight, bias)
    if has_kernel(weight):
        return NativeLinear(weight, bias)
    return PackedLinear(weight, bias, deterministic=deterministic) if onednn_computes(weight) else None


def has_faster_linear(weight: Tensor) -> bool:
    """Whether there is a layer for weights in floating point, as in `faster_linear`, on a CPU or in a fixed order."""
    return has_fixed_order(weight) or has_kernel(weight) or onednn_computes(weight)
