"""Replaces a model's linear layers by ones whose weights are laid out once, and joins those that see the same input."""

import sys
from collections.abc import Callable, Sequence
from dis import Instruction, get_instructions
from functools import cache
from inspect import unwrap
from itertools import pairwise
from typing import TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.linear import faster_linear, has_faster_linear, make_linear
from engine.layers.quantized_linear import QuantizedLinear, quantized_kernel

_MODELS = ("transformers.models.", "transformers_modules.")  # whose linear layers, such as routers, may return more
# Layers that models apply to the same input: joined they keep the threads busy for longer.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MULTIPLIED = ("x_proj_weight", "dt_proj_weight")  # a matrix per head each, in Zamba
# Takes layers that see the same input and what computes them; returns what computes them then.
Wrap = Callable[[Sequence[nn.Module], nn.Module], nn.Module]


class MultipliedLinear(nn.Module):
    """A linear layer whose weight a model multiplies by itself, `layer.weight @ x`, and whose bias it adds later."""

    def __init__(self, products: Sequence[nn.Module], bias: Tensor | None = None) -> None:
        """products: layers without a bias, one for each matrix of the weight."""
        super().__init__()
        self.products, self.bias = nn.ModuleList(products), bias

    @property
    def weight(self) -> "MultipliedLinear":
        """The layer itself, which takes the weight's place."""
        return self

    def __getitem__(self, index: object) -> "MultipliedLinear":
        """Return the same, because the index only adds a dimension."""
        return self

    def __matmul__(self, x: Tensor) -> Tensor:
        """x: [..., in_features, N], as many matrices as the weight has; returns [..., out_features, N]."""
        parts = zip(self.products, x.transpose(-1, -2).chunk(len(self.products)), strict=True)
        return torch.cat([product(part) for product, part in parts]).transpose(-1, -2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        result: Tensor = self.products[0](x)
        return result if self.bias is None else result + self.bias


class LinearGroup:
    """Several linear layers that see the same input, computed at once when the first of them is called."""

    def __init__(self, linears: Sequence[nn.Linear], wrap: Wrap, *, deterministic: bool = True) -> None:
        biases = [bias for linear in linears if (bias := getattr(linear, "bias", None)) is not None]
        bias = torch.cat(biases) if biases else None
        weight = _joined([_weight(linear) for linear in linears])
        self.joined = wrap(linears, make_linear(weight, bias, deterministic=deterministic))
        first = linears[0]
        self.in_features = first.in_features
        self.example = first.weight.new_empty(0)  # has the dtype and device of inputs
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._results: Sequence[Tensor] = ()
        self._used = 0  # how many of the results

    def result(self, index: int, x: Tensor) -> Tensor:
        """Return one layer's result, [..., out_features]. x: [..., in_features], the same tensor for all layers."""
        if x is not self._input:
            self._input, self._used = x, 0
            self._results = self.joined(x).split(self._sizes, dim=-1)
        result = self._results[index]
        self._used += 1
        if self._used == len(self._sizes):  # frees them before the next call
            self._input, self._results = None, ()
        return result


class GroupedLinear(nn.Module):
    """A linear layer that is computed jointly with others."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        self.group, self._index = group, index
        self.joined = group.joined  # a module below this one, as weights are elsewhere

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return self.group.result(self._index, x)


@torch.no_grad()
def pack_linears(
    module: nn.Module, *, deterministic: bool = True, wrap: Wrap = lambda layers, computed: computed
) -> None:
    """Replace the linear layers below `module` that profit, one at a time to save memory. wrap: gets all of them."""
    for names in _GROUPS:
        _join(module, names, deterministic, wrap)
    _replace_multiplied(module, deterministic, wrap)
    for name, child in module.named_children():
        faster: nn.Module | None = None
        if _profits(child) and name not in _weights_read(type(module).forward):
            faster = faster_linear(_weight(child), child.bias, deterministic)
        if isinstance(child, nn.Linear | Conv1D) and not type(child).__module__.startswith(_MODELS):
            setattr(module, name, wrap([child], faster or child))
        else:
            pack_linears(child, deterministic=deterministic, wrap=wrap)


def uncalled_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers that are never called, because their owners compute with the weights (LongCat's routers)."""
    return {
        layer
        for module in model.modules()
        for name in _weights_read(type(module).forward)
        if isinstance(layer := getattr(module, name, None), nn.Module)
    }


def joined_linear(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return one plain layer, not yet packed, of the rows of several that see the same input."""
    biases: list[Tensor] = [bias for layer in layers if (bias := getattr(layer, "bias", None)) is not None]
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    weight, first = _joined([_weight(layer) for layer in layers]), layers[0]
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight, bias, first.weight.dtype)
    joined = nn.Linear(first.in_features, len(weight), bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.register_parameter("bias", bias)
    return joined


def _weight(layer: nn.Linear | Conv1D) -> Tensor | QuantizedWeight:
    """Return a layer's weight, [out_features, in_features]."""
    if isinstance(layer, QuantizedLinear):
        return layer.quantized
    return layer.weight.detach().T if isinstance(layer, Conv1D) else layer.weight.detach()


def _joined(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    grouped = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    return QuantizedWeight.joined(grouped) if grouped else torch.cat([w for w in weights if isinstance(w, Tensor)])


def _join(module: nn.Module, names: Sequence[str], deterministic: bool, wrap: Wrap) -> None:
    """Join the layers of these names, if the module has all of them and they are alike."""
    layers = [child for name in names if isinstance(child := getattr(module, name, None), nn.Linear)]
    kinds = {(type(layer), layer.weight.device, layer.weight.dtype, layer.bias is None) for layer in layers}
    if len(layers) < len(names) or len(kinds) > 1 or not all(map(_profits, layers)):
        return
    grouped = [layer.quantized for layer in layers if isinstance(layer, QuantizedLinear)]
    if any(not weight.can_join(grouped[0]) for weight in grouped):
        return
    group = LinearGroup(layers, wrap, deterministic=deterministic)
    for index, name in enumerate(names):
        setattr(module, name, GroupedLinear(group, index))


def _replace_multiplied(module: nn.Module, deterministic: bool, wrap: Wrap) -> None:
    """Let layers of our own compute the projections whose weights Mamba 1 multiplies by itself."""
    steps = getattr(module, "dt_proj", None)
    if hasattr(module, "x_proj") and _profits(steps):
        product = wrap([steps], make_linear(_weight(steps), deterministic=deterministic))
        module.dt_proj = MultipliedLinear([product], steps.bias)
    for name in _MULTIPLIED:
        weights = getattr(module, name, None)
        if isinstance(weights, nn.Parameter):
            delattr(module, name)
            products = [make_linear(weight, deterministic=deterministic) for weight in weights.detach()]
            setattr(module, name, MultipliedLinear(products))


def _profits(module: object) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether it is a plain linear layer, on one device, of a dtype that is fast there."""
    if hasattr(module, "_hf_hook"):
        return False
    if isinstance(module, QuantizedLinear):
        return quantized_kernel(module.quantized) is not None
    if type(module) not in (nn.Linear, Conv1D):
        return False
    weight: Tensor = module.weight  # type: ignore[attr-defined]
    if weight.device.type != "cpu":
        return weight.is_floating_point()
    return has_faster_linear(weight)


@cache
def _weights_read(forward: Callable[..., object]) -> set[str]:
    """Return the names of layers that a module's forward never calls, because it computes with their weights."""
    steps = [step for step in get_instructions(unwrap(forward)) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    read = {layer.argval for layer, part in pairwise(steps) if part.argval == "weight"}
    return read - {step.argval for step in steps if _loads_method(step)}


def _loads_method(step: Instruction) -> bool:
    return step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
