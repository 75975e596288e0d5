"""Experts whose matrices have weights of 4 or 8 bits.

As in quantized_linear.py, a loaded model holds them in plain modules, and products with a kernel replace these.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.kernels.native import KINDS, call, contiguous, empty, library, native_operator, structure
from engine.kernels.quantized_weight import PARTS, QuantizedWeight, weight_of
from engine.layers.mlp import silu_gate
from engine.layers.quantized_linear import NativeQuantizedLinear, multiply_experts, quantized_kernel

_DOWN = "down_proj"
_SPREAD = 3.0  # of the inputs by which gates are compared
_TOLERANCE = 1e-5


def expert_matrices(module: Any) -> tuple[str, ...]:
    """Return the names of a module's parameters [E, …] that are the matrices of its experts; () if it has none.

    Experts are the classes that transformers' `use_experts_implementation` decorates: it computes all of them by one
    function (integrations/moe.py).
    """
    if not all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", _DOWN)):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", _DOWN)


class QuantizedExperts(nn.Module):
    """Experts that transformers computes, with quantised matrices [E, out, in], also where its own are transposed.

    State dicts have the codes by the matrix's name, and other parts by `part_name`.
    """

    has_bias: bool
    has_gate: bool
    rounds_inputs = False  # as in `QuantizedWeight`; those that are multiplied with FP8 are kept

    def __init__(self, experts: Any, weights: Mapping[str, QuantizedWeight]) -> None:
        """weights: of all `expert_matrices`, in their order."""
        super().__init__()
        vars(self).update({name: value for name, value in vars(experts).items() if name not in vars(nn.Module())})
        for name, child in experts.named_children():  # an activation
            self.add_module(name, child)
        for name, parameter in experts.named_parameters(recurse=False):  # biases
            if name not in weights:
                self.register_parameter(name, parameter)
        self._apply_gate = MethodType(type(experts)._apply_gate, self)
        self._kinds = {name: (weight.bits, weight.floats) for name, weight in weights.items()}
        for name, weight in weights.items():
            parts = weight.parts()
            for part in PARTS:
                self.register_buffer(part_name(name, part), parts.get(part))
        self.packed = nn.ModuleDict()
        self._gates_by_silu: bool = False

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the matrices."""
        return tuple(self._kinds)

    def make_parameters(self) -> None:
        """Make parameters of the buffers, which transformers loads."""
        for name in self._part_names():
            tensor = self._buffers.pop(name)
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def make_buffers(self) -> None:
        """Undo `make_parameters`."""
        for name in self._part_names():
            self.register_buffer(name, self._parameters.pop(name))

    def _part_names(self) -> list[str]:
        return [part_name(name, part) for name in self._kinds for part in PARTS]

    def quantized(self, name: str) -> QuantizedWeight:
        """Return the weight [E, out, in] of a matrix."""
        bits, floats = self._kinds[name]
        weight = weight_of([getattr(self, part_name(name, part)) for part in PARTS], bits, floats=floats)
        return replace(weight, rounds_inputs=self.rounds_inputs and weight.has_integers)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [T, H]; top_k_index: [T, K] int64; top_k_weights: [T, K]; returns [T, H]."""
        weights, chosen = top_k_weights.float(), top_k_index.flatten()
        first, second = (self._product(name) for name in self.matrices)
        results: Tensor = second(self._activated(first(hidden_states, chosen)), chosen)
        if getattr(self, "has_post_expert_norm", False):
            norm: Any = self.post_expert_norm
            results = norm(results)
        results = results.unflatten(0, weights.shape)
        if isinstance(second, NativeExpertProduct) and results.dtype in KINDS:
            return _add_weighted(results, weights)
        total: Tensor = (results.float() * weights[..., None]).sum(dim=1)
        return total.to(results.dtype)

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the matrices out for the kernel of their device, if there is one."""
        for name in self._kinds:
            weight = self.quantized(name)
            kernel = quantized_kernel(weight)
            if kernel is not None:
                kind = NativeExpertProduct if kernel is NativeQuantizedLinear else FixedOrderExpertProduct
                self.packed[name] = kind(weight, self._bias(name))
                for part in PARTS:
                    delattr(self, part_name(name, part))
        self._gates_by_silu = self.has_gate and self._computes_silu_gate()

    def _product(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        packed = name in self.packed
        return self.packed[name] if packed else _UnpackedProduct(self.quantized(name), self._bias(name))

    def _bias(self, name: str) -> Tensor | None:
        """Return a matrix's bias [E, out]."""
        return getattr(self, f"{name}_bias") if self.has_bias else None

    def _activated(self, hidden: Tensor) -> Tensor:
        """hidden: [S, 2 I], or [S, I] of experts without gates; returns [S, I]."""
        if self._gates_by_silu and hidden.device.type == "cpu" and hidden.dtype in KINDS:
            return silu_gate(hidden)
        activate: Any = self._apply_gate if self.has_gate else self.act_fn
        result: Tensor = activate(hidden)
        return result

    def _computes_silu_gate(self) -> bool:
        if library() is None:
            return False
        hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * _SPREAD
        return torch.allclose(self._apply_gate(hidden), silu_gate(hidden), rtol=_TOLERANCE, atol=_TOLERANCE)


class _UnpackedProduct:
    """Products of rows with the matrices of experts, which it unpacks."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """weight: [E, out, in]; bias: [E, out]."""
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x: [S / K, in], each for K neighbours; chosen: [S], an expert each; returns [S, out]."""
        rows = x.repeat_interleave(len(chosen) // len(x), dim=0)
        output = x.new_empty(len(chosen), self._weight.shape[1])
        for index in chosen.unique().tolist():
            own = chosen == index
            bias = None if self._bias is None else self._bias[index].to(x.dtype)
            output[own] = linear(rows[own], self._weight.expert(index).dequantized().to(x.dtype), bias)
        return output


class NativeExpertProduct(nn.Module):
    """The same on a CPU, up to rounding."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """weight: [E, out, in]; bias: [E, out]."""
        super().__init__()
        biases = [None] * len(weight.codes) if bias is None else bias
        layers = [NativeQuantizedLinear(weight.expert(index), bias) for index, bias in enumerate(biases)]
        self.constants, self.order, self.table = layers[0].constants, weight.order, weight.table
        self.codes = torch.stack([layer.codes for layer in layers])
        self.scales = torch.stack([layer.scales for layer in layers])
        offsets = [layer.offsets for layer in layers if layer.offsets is not None]
        self.offsets = torch.stack(offsets) if offsets else None
        self.bias = torch.stack([layer.bias for layer in layers])

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As in `_UnpackedProduct`."""
        dtype = x.dtype
        if self.order is not None:
            x = x.index_select(-1, self.order)
        x = x if dtype in KINDS else x.float()
        parts = self.codes, self.scales, self.offsets, self.table
        return multiply_experts(x, chosen, parts, self.bias, self.constants).to(dtype)


class FixedOrderExpertProduct(nn.Module):
    """The same on a GPU, up to rounding."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """weight: [E, out, in]; bias: [E, out]."""
        super().__init__()
        self._weight, self._bias = weight, None if bias is None else bias.detach()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As in `_UnpackedProduct`."""
        from engine.kernels.triton_quantized_experts import fixed_order_experts

        order = self._weight.order
        return fixed_order_experts(x if order is None else x.index_select(-1, order), chosen, self._weight, self._bias)


_Weighted = structure("*x *weights rows count size threads *output")


@native_operator
def _add_weighted(x: Tensor, weights: Tensor) -> Tensor:
    """x: [T, K, H]; weights: [T, K] float32; returns [T, H]."""
    x, weights = contiguous(x), contiguous(weights)
    output = empty(len(x), x.shape[2], dtype=x.dtype)
    addresses = x.data_ptr(), weights.data_ptr()
    call(f"add_weighted_{KINDS[x.dtype]}", _Weighted(*addresses, *x.shape, torch.get_num_threads(), output.data_ptr()))
    return output


def pack_experts(module: nn.Module) -> None:
    """Pack the quantised experts in `module`."""
    for experts in module.modules():
        if isinstance(experts, QuantizedExperts):
            experts.pack()


def part_name(matrix: str, part: str) -> str:
    """Return the name of a part of a matrix, by `PARTS`."""
    return matrix if part == PARTS[0] else f"{matrix}_{part}"
