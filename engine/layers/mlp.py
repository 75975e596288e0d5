"""Gated feed-forward layers, SwiGLU (Shazeer, arXiv 2002.05202), as two matrix products with one pass in between."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.kernels.native import KINDS, call, contiguous, empty, library, native_operator, structure
from engine.layers.packing import GroupedLinear, LinearGroup

_DTYPES_ON_GPU = (torch.float32, torch.bfloat16, torch.float16)
_SPREADS = 3.0, 300.0  # of gates: where they bend, and far out, where some layers limit them
_SPREADS_OF_HALF = 3.0, 60.0  # a product of two larger ones is no float16
_TOLERANCE = 0.02  # relative, of the norm of a result: some steps of bfloat16
_MODULES = "transformers.activations", "torch.nn.modules.activation"
_ACTIVATION_TOLERANCE = 1e-5
# In the order of engine/kernels/cpp/activation.cpp.
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    functional.silu,
    partial(functional.gelu, approximate="tanh"),
    functional.gelu,
    lambda x: x * torch.sigmoid(1.702 * x),
)


_Call = structure("*both rows size threads *output")


class GatedMLP(nn.Module):
    """Computes down(silu(gate) · up), with transformers' rounding."""

    def __init__(self, gate_and_up: LinearGroup, down: nn.Module) -> None:
        super().__init__()
        self.down_proj = down
        self.gate_and_up = gate_and_up.joined

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H]; returns the same shape."""
        both = self.gate_and_up(x)
        result: Tensor = self.down_proj(silu_gate(both) if both.device.type == "cpu" else _silu_gate_on_gpu(both))
        return result


@native_operator
def silu_gate(both: Tensor) -> Tensor:
    """Return silu(gate) · up, [..., I]. both: [..., 2 I], gate before up."""
    both = contiguous(both)
    size = both.shape[-1] // 2
    output = empty(*both.shape[:-1], size, dtype=both.dtype)
    sizes = output.numel() // size, size, torch.get_num_threads()
    call(f"silu_gate_{KINDS[both.dtype]}", _Call(both.data_ptr(), *sizes, output.data_ptr()))
    return output


def _silu_gate_on_gpu(both: Tensor) -> Tensor:
    from engine.kernels import triton_elementwise as elementwise

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
    return example.device.type == "cpu" and example.dtype in KINDS and library() is not None


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


_ActivationCall = structure("*x function rows size threads *output")


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
        if x.dtype not in KINDS or not x.numel():
            result: Tensor = self._original(x)
            return result
        return _activate(x, self._function)


@native_operator
def _activate(x: Tensor, function: int) -> Tensor:
    x = contiguous(x)
    output = empty(*x.shape, dtype=x.dtype)
    size = x.shape[-1]
    sizes = x.numel() // size, size, torch.get_num_threads()
    call(f"activate_{KINDS[x.dtype]}", _ActivationCall(x.data_ptr(), function, *sizes, output.data_ptr()))
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
        if isinstance(result, Tensor) and torch.allclose(
            result, function(x), rtol=_ACTIVATION_TOLERANCE, atol=_ACTIVATION_TOLERANCE
        ):
            return index
    return None
