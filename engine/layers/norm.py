"""Root mean square normalisation in one pass over memory; transformers' takes eight."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from engine.kernels.native import KINDS, call, contiguous, empty, library, native_operator, structure
from engine.layers.linear import has_fixed_order

_TOLERANCE = 0.01  # a little more than half a step of bfloat16


_Call = structure("*x *weight rows size threads *output .eps")


class NativeRMSNorm(nn.Module):
    """Zhang and Sennrich, arXiv 1910.07467, with transformers' rounding."""

    def __init__(self, original: nn.Module, weight: Tensor, eps: float) -> None:
        """original: the layer that this one replaces; it still computes inputs of another dtype."""
        super().__init__()
        self.weight, self._eps, self._original = weight, eps, original

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        if x.dtype != self.weight.dtype:
            result: Tensor = self._original(x)
            return result
        return _normalise(x, self.weight, self._eps)


@native_operator
def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = contiguous(x)
    output = empty(*x.shape, dtype=x.dtype)
    size = x.shape[-1]
    sizes = x.numel() // size, size, torch.get_num_threads()
    call(f"rms_norm_{KINDS[x.dtype]}", _Call(x.data_ptr(), weight.data_ptr(), *sizes, output.data_ptr(), eps))
    return output


class TorchRMSNorm(nn.Module):
    """The same by torch's own kernel, on GPUs. It rounds once, after the weights."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        return rms_norm(x, self.weight.shape, self.weight, self._eps)


class FixedOrderRMSNorm(nn.Module):
    """Root mean square normalisation, a token at a time. It rounds once, after the weights."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [H]."""
        super().__init__()
        self.weight, self._eps = weight.detach(), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        from engine.kernels.triton_elementwise import fixed_order_rms_norm

        return fixed_order_rms_norm(x, self.weight, self._eps)


@torch.no_grad()
def replace_norms(module: nn.Module, *, deterministic: bool = True) -> None:
    """Replace the layers below `module` that compute the same on random inputs."""
    for name, child in module.named_children():
        weight, eps = getattr(child, "weight", None), getattr(child, "variance_epsilon", getattr(child, "eps", None))
        if not type(child).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
            replace_norms(child, deterministic=deterministic)
            continue
        x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
        for faster in _faster(child, weight, eps, deterministic):
            if torch.allclose(faster(x), child(x), rtol=_TOLERANCE, atol=_TOLERANCE):
                setattr(module, name, faster)
                break


def _faster(norm: nn.Module, weight: Tensor, eps: float, deterministic: bool) -> Iterator[nn.Module]:
    """Yield candidates to replace a norm on its device."""
    if deterministic and has_fixed_order(weight) and not hasattr(norm, "_hf_hook"):
        yield FixedOrderRMSNorm(weight, eps)
        yield FixedOrderRMSNorm(1 + weight.float(), eps)  # Gemma's
    elif weight.device.type != "cpu" and not hasattr(norm, "_hf_hook"):
        yield TorchRMSNorm(weight, eps)
    elif weight.device.type == "cpu" and weight.dtype in KINDS and weight.is_contiguous() and library():
        yield NativeRMSNorm(norm, weight, eps)
