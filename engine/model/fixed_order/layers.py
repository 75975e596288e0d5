"""Layers of fixed order in place of a model's own, on GPUs. Imports Triton only when such a layer runs."""

import torch
from torch import Tensor, nn

_DEVICE = "cuda"  # tests put the interpreter's here
_DTYPES = (torch.bfloat16, torch.float16)


def serves(weight: Tensor) -> bool:
    """Whether these layers run on the device of the weights and in their dtype."""
    return weight.device.type == _DEVICE and weight.dtype in _DTYPES


class FixedOrderLinear(nn.Module):
    """A linear layer that gives a token the same bits however many tokens run beside it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]; out_dtype: of the result; None: the input's."""
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach()
        self._out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        from engine.model.fixed_order.linear import fixed_order_linear

        return fixed_order_linear(x, self.weight, self.bias, self._out_dtype)


class FixedOrderRMSNorm(nn.Module):
    """Root mean square normalisation, a token at a time. It rounds once, after the weights."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [H]."""
        super().__init__()
        self.weight, self._eps = weight.detach(), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        from engine.model.fixed_order.norm import fixed_order_rms_norm

        return fixed_order_rms_norm(x, self.weight, self._eps)
