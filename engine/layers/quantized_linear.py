"""Linear layers and embeddings with weights of 4 or 8 bits.

A loaded model holds them in plain modules. On CPUs and GPUs layers with a kernel replace these: they unpack weights in
registers only.

With `rounds_inputs`, they multiply integers: each row's inputs get a scale for each group, and 8 bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from engine.kernels.native import KINDS, call, contiguous, empty, library, native_operator, structure
from engine.kernels.quantized_weight import GROUP, PARTS, QuantizedWeight, rounded_to_nearest, weight_of

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # in the order of engine/kernels/cpp/vectors.h
_WORD = 32  # bits
_LEAST_BLOCK = 16  # inputs that a GPU multiplies at once; they are of one group


class QuantizedModule(nn.Module):
    """Holds the tensors of a `QuantizedWeight`, in state dicts by `PARTS`: there its codes are called `weight`."""

    weight: Tensor  # empty, in the dtype of inputs or results, which models look at; while loading: the codes
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    table: Tensor | None
    rounds_inputs = False  # as in `QuantizedWeight`
    is_transposed = False  # what it is rounded from while it is loaded, as in `Conv1D`

    def _hold(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.bits, self.floats, self.dtype = weight.bits, weight.floats, dtype
        self._register(weight.parts())

    def _register(self, parts: Mapping[str, Tensor | None]) -> None:
        """Register the parts as buffers: a model's dtype is that of its first parameter."""
        for name in PARTS:
            self.register_buffer("codes" if name == "weight" else name, parts.get(name))
        self.weight = self.codes.new_empty(0, dtype=self.dtype)

    def make_parameters(self) -> None:
        """Make parameters of the buffers, which transformers loads."""
        del self.weight
        for name in PARTS:
            tensor = self._buffers.pop("codes" if name == "weight" else name)
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def make_buffers(self) -> None:
        """Undo `make_parameters`."""
        self._register({name: self._parameters.pop(name) for name in PARTS})

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (codes := destination.pop(f"{prefix}codes", None)) is not None:
            destination[f"{prefix}weight"] = codes

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight."""
        parts = self.codes, self.scales, self.offsets, self.order, self.table
        return replace(weight_of(parts, self.bits, floats=self.floats), rounds_inputs=self.rounds_inputs)


class QuantizedLinear(QuantizedModule, nn.Linear):
    """A linear layer that unpacks its weight for each product; `pack_linears` replaces it where it can."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        """bias: [out]. dtype: of the inputs."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self._hold(weight, dtype)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]; returns [..., out]."""
        return linear(x, self.quantized.dequantized().to(x.dtype), self.bias)


@torch.no_grad()
def round_linears(module: nn.Module, bits: int) -> None:
    """Quantise the linear layers in `module` whose inputs make whole groups."""
    for path, layer in list(module.named_modules()):
        if type(layer) is nn.Linear and layer.in_features % GROUP == 0:
            weight = rounded_to_nearest(layer.weight, bits)
            module.set_submodule(path, QuantizedLinear(weight, layer.bias, layer.weight.dtype))


class QuantizedEmbedding(QuantizedModule):
    """An embedding that unpacks the rows that it returns."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, factor: float = 1.0) -> None:
        """dtype: of the result. factor: multiplies the result, as in Gemma."""
        super().__init__()
        self.num_embeddings = weight.shape[0]
        self._hold(weight, dtype)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...]; returns [..., in]."""
        result = self.quantized.rows(ids.flatten()).dequantized().to(self.dtype).view(*ids.shape, -1)
        return result if self.factor == 1.0 else result * torch.tensor(self.factor, dtype=self.dtype)


def computes_integers(device: torch.device) -> bool:
    """Whether there are layers that compute with quantised weights on a device."""
    native = library() if device.type == "cpu" else None
    return device.type == "cuda" or (native is not None and native.linear_panel() > 0)


def quantized_kernel(weight: QuantizedWeight) -> "type[NativeQuantizedLinear | FixedOrderQuantizedLinear] | None":
    """Return the class of layers that compute with such a weight on its device; None: there is none."""
    device = weight.codes.device
    if not computes_integers(device):
        return None
    if device.type == "cpu":
        return None if weight.group % (_WORD // weight.bits) else NativeQuantizedLinear
    return None if weight.group % _LEAST_BLOCK else FixedOrderQuantizedLinear


class FixedOrderQuantizedLinear(nn.Module):
    """A linear layer on a GPU; the result is that of the unpacked weight up to rounding."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """bias: [out]. out_dtype: of the result; None: the input's."""
        super().__init__()
        self.codes, self.scales, self.offsets = weight.codes, weight.scales, weight.offsets
        self.order, self.table = weight.order, weight.table
        self.bias = None if bias is None else bias.detach()
        self._bits, self._floats, self.out_dtype = weight.bits, weight.floats, out_dtype
        self.weight = self.scales.new_empty(0, dtype=torch.float32)  # models look at its dtype

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight."""
        parts = self.codes, self.scales, self.offsets, self.order, self.table
        return weight_of(parts, self._bits, floats=self._floats)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]; returns [..., out]."""
        from engine.kernels.triton_quantized_linear import fixed_order_quantized_linear

        ordered = x if self.order is None else x.index_select(-1, self.order)
        return fixed_order_quantized_linear(ordered, self.quantized, self.bias, self.out_dtype)


class NativeQuantizedLinear(nn.Module):
    """A linear layer on a CPU; the result is that of the unpacked weight up to rounding.

    With `rounds_inputs`, an input x becomes code · scale, and scale is the largest |x| of its row and group / 127.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, out_dtype: torch.dtype | None = None) -> None:
        """bias: [out]. out_dtype: of the result; None: the input's."""
        super().__init__()
        native = library()
        assert native is not None
        panel = native.linear_panel()
        columns, size = weight.shape
        kind = int(weight.floats), int(weight.rounds_inputs)
        self.constants = weight.bits, *kind, weight.zero, weight.group, size
        self.codes = _in_panels(_words(weight.codes, weight.bits), panel)
        self.scales = _in_panels(weight.scales, panel)
        self.offsets = None if weight.offsets is None else _in_panels(weight.offsets, panel)
        self.order, self.table = weight.order, weight.table
        self.bias = torch.zeros(columns) if bias is None else bias.detach().float().contiguous()
        self._out_dtype = out_dtype

    @property
    def weight(self) -> Tensor:
        """A tensor of a dtype that inputs may have, because some models read the dtype of a weight."""
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]; returns [..., out]."""
        out_dtype = self._out_dtype or x.dtype
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if x.dtype == torch.float16:  # it has no function of its own
            x = x.float()
        kind = torch.float32 if out_dtype == torch.float16 else out_dtype
        parts = self.codes, self.scales, self.offsets, self.table
        return _multiply(x, parts, self.bias, self.constants, kind).to(out_dtype)


class NativeQuantizedEmbedding(nn.Module):
    """An embedding that shares its weight with the output layer."""

    def __init__(self, layer: NativeQuantizedLinear, dtype: torch.dtype, factor: float = 1.0) -> None:
        """dtype: of the result. factor: see `QuantizedEmbedding`."""
        super().__init__()
        self._layer, self._dtype, self._factor = layer, dtype, factor

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] int64; returns [..., in]."""
        layer = self._layer
        kind = torch.float32 if self._dtype == torch.float16 else self._dtype
        parts = layer.codes, layer.scales, layer.offsets, layer.table
        rows = _rows(ids, parts, layer.constants, kind).to(self._dtype)
        return rows if self._factor == 1.0 else rows * torch.tensor(self._factor, dtype=self._dtype)


_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # codes, scales and offsets in panels, and a table
_Weight = "*codes *scales *offsets *table bits floats rounds_inputs zero group size scale_kind"
_fields = f"{_Weight} *x *bias x_kind output_kind rows columns threads *output"
_Multiplication, _ExpertsMultiplication = structure(_fields), structure(f"{_fields} *experts count each")
_Rows = structure(f"{_Weight} *ids rows output_kind *output")


@native_operator
def _multiply(x: Tensor, parts: _Parts, bias: Tensor, constants: Sequence[int], out_dtype: torch.dtype) -> Tensor:
    size = constants[-1]
    if x.dtype not in KINDS or x.shape[-1] != size:
        raise ValueError(f"inputs are {x.shape[-1]} features in {x.dtype}, not {size} in float32 or bfloat16")
    x = contiguous(x)
    output = empty(*x.shape[:-1], len(bias), dtype=out_dtype)
    arguments = _Multiplication(
        *_weight(parts, constants),
        *(x.data_ptr(), bias.data_ptr(), _NUMBERS.index(x.dtype), _NUMBERS.index(out_dtype)),
        *(x.shape[:-1].numel(), len(bias), torch.get_num_threads(), output.data_ptr()),
    )
    call("quantized_linear", arguments)
    return output


@native_operator
def multiply_experts(x: Tensor, chosen: Tensor, parts: _Parts, bias: Tensor, constants: Sequence[int]) -> Tensor:
    """Return products with the weights of experts, which have a dimension more than those of layers.

    x: [S / K, in], each row for K neighbours of the result; chosen: [S] int64, an expert each; returns [S, out].
    """
    x, chosen = contiguous(x), contiguous(chosen)
    count, columns = bias.shape
    rows, kind = len(chosen), _NUMBERS.index(x.dtype)
    output = empty(rows, columns, dtype=x.dtype)
    arguments = _ExpertsMultiplication(
        *_weight(parts, constants),
        *(x.data_ptr(), bias.data_ptr(), kind, kind, rows, columns, torch.get_num_threads(), output.data_ptr()),
        *(chosen.data_ptr(), count, rows // len(x)),
    )
    call("quantized_experts", arguments)
    return output


@native_operator
def _rows(ids: Tensor, parts: _Parts, constants: Sequence[int], dtype: torch.dtype) -> Tensor:
    ids = contiguous(ids)
    output = empty(*ids.shape, constants[-1], dtype=dtype)
    weight = _weight(parts, constants)
    call("quantized_rows", _Rows(*weight, ids.data_ptr(), ids.numel(), _NUMBERS.index(dtype), output.data_ptr()))
    return output


def _weight(parts: _Parts, constants: Sequence[int]) -> tuple[int | None, ...]:
    addresses = (None if part is None else part.data_ptr() for part in parts)
    return *addresses, *constants, _NUMBERS.index(parts[1].dtype)


def _in_panels(rows: Tensor, panel: int) -> Tensor:
    """Return [panels, N, panel]. rows: [out, N]."""
    padded: Tensor = pad(rows.detach(), (0, 0, 0, -len(rows) % panel))
    panels: Tensor = padded.unflatten(0, (-1, panel))
    return panels.transpose(1, 2).contiguous()


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return [out, words] int32, whose lower halves have the even inputs. codes: as in `QuantizedWeight`."""
    four: Tensor = codes.detach().unflatten(1, (-1, 4))
    if bits == 8:
        return four[..., [0, 2, 1, 3]].view(torch.int32)[..., 0]
    packed = four.contiguous().view(torch.int32)[..., 0]
    even, odd = packed & 0x0F0F0F0F, packed >> 4 & 0x0F0F0F0F
    for half in (even, odd):  # bring four nibbles together
        half.bitwise_or_(half >> 4).bitwise_and_(0x00FF00FF)
        half.bitwise_or_(half >> 8).bitwise_and_(0x0000FFFF)
    return even | odd << 16
