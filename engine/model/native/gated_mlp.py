"""Gated feed-forward layers, SwiGLU (Shazeer, arXiv 2002.05202), as two matrix products with one pass in between."""

import ctypes

import torch
from torch import Tensor, nn

from engine.model.native.calls import call, empty, native_operator
from engine.model.native.elementwise import contiguous
from engine.model.native.library import library
from engine.model.packed_linear import GroupedLinear, LinearGroup

_NAMES = {torch.float32: "silu_gate_float32", torch.bfloat16: "silu_gate_bfloat16"}
_DTYPES_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)
_SPREADS = 3.0, 300.0  # of gates: where they bend, and far out, where some layers limit them
_SPREADS_OF_HALF = 3.0, 60.0  # a product of two larger ones is no float16
_TOLERANCE = 0.02  # relative, of the norm of a result: some steps of bfloat16


class _Call(ctypes.Structure):
    _fields_ = [
        ("both", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "size", "threads")),
        ("output", ctypes.c_void_p),
    ]


class GatedMLP(nn.Module):
    """Computes down(silu(gate) · up), with transformers' rounding."""

    def __init__(self, gate_and_up: LinearGroup, down: nn.Module) -> None:
        super().__init__()
        self.down_proj = down
        self.gate_and_up = gate_and_up.joined

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        both = self.gate_and_up(x)
        result: Tensor = self.down_proj(_silu_gate_on_gpu(both) if both.is_cuda else silu_gate(both))
        return result


@native_operator
def silu_gate(both: Tensor) -> Tensor:
    """Return silu(gate) · up, [..., I]. both: [..., 2 I], gate before up."""
    both = contiguous(both)
    size = both.shape[-1] // 2
    output = empty(*both.shape[:-1], size, dtype=both.dtype)
    sizes = output.numel() // size, size, torch.get_num_threads()
    call(_NAMES[both.dtype], _Call(both.data_ptr(), *sizes, output.data_ptr()))
    return output


def _silu_gate_on_gpu(both: Tensor) -> Tensor:
    from engine.model.fixed_order import elementwise

    return elementwise.silu_gate(both)


@torch.no_grad()
def replace_mlps(module: nn.Module) -> None:
    """Replace the layers below `module` that compute what `GatedMLP` does on random inputs."""
    for name, child in module.named_children():
        gate, down = getattr(child, "gate_proj", None), getattr(child, "down_proj", None)
        if not isinstance(gate, GroupedLinear) or not isinstance(down, nn.Module):
            replace_mlps(child)
        elif _may_be_faster(gate.group.example) and not hasattr(child, "_hf_hook"):
            faster = GatedMLP(gate.group, down)
            if _agree(faster, child, gate.group):
                setattr(module, name, faster)


def _may_be_faster(example: Tensor) -> bool:
    if example.is_cuda:
        return example.dtype in _DTYPES_ON_GPU
    return example.device.type == "cpu" and example.dtype in _NAMES and library() is not None


def _agree(faster: GatedMLP, mlp: nn.Module, group: LinearGroup) -> bool:
    """Whether both agree on random inputs."""
    x = torch.randn(1, 4, group.in_features, generator=torch.Generator().manual_seed(0)).to(group.example)
    gates, _ = group.joined(x).float().chunk(2, dim=-1)
    for spread in _SPREADS_OF_HALF if x.dtype == torch.float16 else _SPREADS:
        scaled = x * (spread / gates.std())
        try:
            result, expected = faster(scaled), mlp(scaled)
        except Exception:  # it takes other arguments
            return False
        if not isinstance(expected, Tensor) or expected.shape != result.shape:
            return False
        if not (result - expected).float().norm() <= _TOLERANCE * expected.float().norm():
            return False
    return True
