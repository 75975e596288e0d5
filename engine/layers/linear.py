"""Linear layers whose weights are laid out once, at loading. Those that see the same input are computed as one.

Each kind of weights has a class, which `_replacement` chooses. On CPUs our own kernels compute them (`NativeLinear`;
integers: engine/layers/quantized_linear.py), and oneDNN (`PackedLinear`) where there is no compiler for ours: torch's
own `linear` reads weights at little more than half the speed of memory (docs/experiments.md). On GPUs sums have a fixed
order (`FixedOrderLinear`).
"""

import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dis import Instruction, get_instructions
from functools import cache, partial
from inspect import unwrap
from itertools import pairwise
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from engine.kernels.native import call, contiguous, empty, library, native_operator, structure
from engine.kernels.operator_trace import as_one_operator
from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.quantized_linear import QuantizedLinear, quantized_kernel

_MODELS = ("transformers.models.", "transformers_modules.")  # whose linear layers, such as routers, may return more
_FIXED_ORDER_DEVICE = "cuda"  # tests put the interpreter's here
_FIXED_ORDER_DTYPES = (torch.bfloat16, torch.float16)
_FUNCTIONS = {  # native ones, by the dtypes of weights and results
    (torch.float32, torch.float32): "linear_float32",
    (torch.bfloat16, torch.bfloat16): "linear_bfloat16",
    (torch.bfloat16, torch.float32): "linear_bfloat16_to_float32",
}
_DEPTHS = {torch.float32: 1, torch.bfloat16: 2}  # input features that they multiply at once

# What follows is oneDNN's. For each number of tokens, oneDNN and torch cache 0.8 MiB of code per shape of weights. So
# few numbers of tokens are computed: `padded_size`. Without AMX, oneDNN gives a token the same bits for every number of
# tokens but one, so there are at least two. With AMX the bits depend on the batch. Each shape is checked where it runs.
_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_TOKENS = 8  # the layout is made for so many; it serves other numbers almost as well
_LEAST, _EXACT = 2, 16  # tokens; between these there is no padding
_SIZES_PER_DOUBLING = 8  # beyond that: padding adds at most an eighth
_CHECKED = (2, 3, 4, 8, 16, 18, 32, 64, 128, 256)  # numbers of tokens whose results are compared
_MOVED = slice(50, 66)  # tokens whose results are compared with those that they get at the beginning
_product = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")
_sizes_by_shape: dict[tuple[object, ...], Sequence[int]] = {}  # of `_sizes`: the machine's property, measured once

# Layers that models apply to the same input: joined they keep the threads busy for longer.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MULTIPLIED = ("x_proj_weight", "dt_proj_weight")  # a matrix per head each, in Zamba
# Takes layers that see the same input and what computes them; returns what computes them then.
Wrap = Callable[[Sequence[nn.Module], nn.Module], nn.Module]

_log = logging.getLogger(__name__)


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

        Raises:
            ValueError: x has another dtype or another number of features.
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


class PackedLinear(nn.Module):
    """A linear layer that oneDNN computes; the result equals that of `nn.Linear` up to rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, deterministic: bool = True) -> None:
        """weight: [out_features, in_features]; bias: [out_features]. deterministic: see `use_faster_layers`."""
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
        self.bias = bias
        self._sizes = _sizes(self.weight) if deterministic else ()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return packed_linear(x, self.weight, self.bias, self._sizes)


def padded_size(tokens: int) -> int:
    """Round a number of tokens up to one that `PackedLinear` computes."""
    if tokens <= _EXACT:
        return max(tokens, _LEAST)
    step = (1 << (tokens - 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return -(-tokens // step) * step


@as_one_operator
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int] = ()) -> Tensor:
    """x: [..., in_features]; weight: packed; sizes: see `PackedLinear`; returns [..., out_features]."""
    tokens = x.shape[:-1].numel()
    if sizes and tokens > sizes[-1]:
        parts = x.reshape(tokens, -1).split(sizes[-1])
        return torch.cat([packed_linear(part, weight, bias, sizes) for part in parts]).view(*x.shape[:-1], -1)
    # The forward is padded as a whole, but the output layer sees some tokens only, and experts see any number.
    padding = (sizes[bisect_left(sizes, tokens)] if sizes else padded_size(tokens)) - tokens
    result: Tensor
    if padding:
        padded = pad(x.reshape(tokens, -1), (0, 0, 0, padding))
        result = _product(padded, weight, bias)[:tokens].view(*x.shape[:-1], -1)
    else:
        result = _product(x, weight, bias)
    return result


def _sizes(weight: Tensor) -> Sequence[int]:
    """Return the numbers of tokens that give a token the same bits; () if all do. weight: packed."""
    key = *weight.shape, weight.dtype, torch.get_num_threads()
    if key not in _sizes_by_shape:
        x = torch.randn(_CHECKED[-1], weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        results = [_product(x[:count], weight, None) for count in _CHECKED]
        sizes = _largest_group(results)
        if not torch.equal(_product(x[_MOVED], weight, None), results[-1][_MOVED]):
            _log.warning("products of %s depend on the batch; install a C++ compiler, then they don't", [*weight.shape])
        elif len(sizes) < len(_CHECKED):
            _log.warning("products of %s run with %s tokens only, where rounding is the same", [*weight.shape], sizes)
        _sizes_by_shape[key] = () if len(sizes) == len(_CHECKED) else sizes
    return _sizes_by_shape[key]


def _largest_group(results: Sequence[Tensor]) -> Sequence[int]:
    """Return the numbers of rows of those results that agree with each other. They are of the same rows' beginnings."""
    groups = [
        [len(right) for right in results if torch.equal(left[: len(right)], right[: len(left)])] for left in results
    ]
    return max(groups, key=len)


class JoinedLinear(nn.Module):
    """Several linear layers as one, computed by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]; returns [..., out_features]."""
        return linear(x, self.weight, self.bias)


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
            faster = _replacement(_weight(child), child.bias, deterministic)
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
    faster = _replacement(weight, bias, deterministic)
    if faster is not None:
        return faster
    assert isinstance(weight, Tensor)
    return JoinedLinear(weight, bias)


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


def _replacement(weight: Tensor | QuantizedWeight, bias: Tensor | None, deterministic: bool) -> nn.Module | None:
    """Return a layer for the device of the weights, [out_features, in_features]; None: torch's own is as good."""
    if isinstance(weight, QuantizedWeight):
        kind = quantized_kernel(weight)
        return None if kind is None else kind(weight, bias)
    if deterministic and has_fixed_order(weight):
        return FixedOrderLinear(weight, bias)
    if has_kernel(weight):
        return NativeLinear(weight, bias)
    return PackedLinear(weight, bias, deterministic=deterministic) if _onednn_computes(weight) else None


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
    return has_fixed_order(weight) or has_kernel(weight) or _onednn_computes(weight)


@cache
def _weights_read(forward: Callable[..., object]) -> set[str]:
    """Return the names of layers that a module's forward never calls, because it computes with their weights."""
    steps = [step for step in get_instructions(unwrap(forward)) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    read = {layer.argval for layer, part in pairwise(steps) if part.argval == "weight"}
    return read - {step.argval for step in steps if _loads_method(step)}


def _loads_method(step: Instruction) -> bool:
    return step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))


def _onednn_computes(weight: Tensor) -> bool:
    """Whether oneDNN computes the layer on this CPU, and in its dtype."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
