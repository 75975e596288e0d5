"""Lets transformers load weights of 4 or 8 bits: from folders that have them, or rounded while they are read."""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from engine.kernels.quantized_weight import (
    BITS,
    GROUP,
    NF4_BLOCK,
    PARTS,
    Quantization,
    QuantizedWeight,
    rounded,
    weight_of,
)
from engine.layers.latent import PROJECTION
from engine.layers.packing import uncalled_layers
from engine.layers.quantized_experts import QuantizedExperts, expert_matrices, part_name
from engine.layers.quantized_linear import QuantizedEmbedding, QuantizedLinear, QuantizedModule
from engine.layers.sharded import keep_parts, plan_parts

METHOD = "consort"  # in a checkpoint's configuration
_SCALES = ".scales", "_scales"  # end names of a layer's, and of those of experts
_EMPTY = "empty"  # name of a parameter
T = TypeVar("T")
_DTYPES = {"U8": torch.uint8, "F16": torch.float16, "F32": torch.float32}  # in safetensors


@register_quantization_config(METHOD)
class IntegerConfig(QuantizationConfigMixin):
    """The `quantization_config` of such checkpoints in `config.json`."""

    def __init__(
        self, kind: Quantization | None = None, layers: Mapping[str, QuantizedWeight] | None = None, **_: object
    ) -> None:
        """kind: to round to. layers: of a state dict, on the meta device. Without both, layers are in files."""
        self.quant_method = cast(Any, METHOD)  # transformers names its own in an enumeration
        self.kind, self.layers = kind, layers


def can_be_quantized(layer: nn.Module) -> bool:
    """Whether there is a quantised form of a layer."""
    is_scaled = isinstance(layer, nn.Embedding) and hasattr(layer, "scalar_embed_scale")  # Gemma's
    return type(layer) in (nn.Linear, nn.Embedding, Conv1D) or is_scaled


def named_parts(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of a weight by their names in checkpoints. name: of the weight, or of a matrix of experts."""
    return {_part(name, part): tensor for part, tensor in weight.parts().items()}


def expert_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the matrices of experts that can be quantised: their names, and [E, out, in]."""
    for path, module in model.named_modules():
        for name in expert_matrices(module):
            count, first, second = module.get_parameter(name).shape
            yield f"{path}.{name}", (count, second, first) if module.is_transposed else (count, first, second)


def rounded_experts(model: PreTrainedModel) -> dict[str, tuple[int, int, int]]:
    """Return the matrices of experts that are rounded."""
    return complete_experts(model, {name: shape for name, shape in expert_shapes(model) if shape[-1] % GROUP == 0})


def complete_experts(model: nn.Module, matrices: dict[str, T]) -> dict[str, T]:
    """Leave out matrices of experts that have others. matrices: with what belongs to them, by name; also of layers."""

    def is_complete(name: str) -> bool:
        path = name.rpartition(".")[0]
        return all(f"{path}.{matrix}" in matrices for matrix in expert_matrices(model.get_submodule(path)))

    return {name: value for name, value in matrices.items() if is_complete(name)}


def rounded_layers(model: PreTrainedModel, kind: Quantization) -> Iterator[tuple[str, Any, Quantization]]:
    """Yield the layers that are rounded, their names, and to what: embeddings and the output layer to 8 bits."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = model.config.get_text_config().tie_word_embeddings
    uncalled = uncalled_layers(model)
    alike = not tied or type(ends[0]) is nn.Embedding  # else the output layer stays as the embedding does
    for name, module in model.named_modules():
        is_fit = (
            type(module) in (nn.Linear, nn.Embedding, Conv1D)
            and _out_first(module, module.weight).shape[1] % GROUP == 0
        )
        if not is_fit or module in uncalled:
            continue
        if any(module is end for end in ends):
            if alike:
                yield name, module, "int8"
        elif not isinstance(module, nn.Embedding) and not name.endswith(f".{PROJECTION}"):  # it runs in two directions
            yield name, module, kind


def rounded_weights(model: PreTrainedModel, kind: Quantization) -> dict[str, QuantizedWeight]:
    """Return what layers and matrices of experts become, by their names, on the meta device."""
    layers = rounded_layers(model, kind)
    weights = {name: empty_weight(_out_first(layer, layer.weight).shape, own) for name, layer, own in layers}
    return weights | {name: empty_weight(shape, kind) for name, shape in rounded_experts(model).items()}


@torch.no_grad()
def round_layers(model: PreTrainedModel, kind: Quantization) -> None:
    """Round the layers of a model that is loaded already."""
    dtype = model.dtype
    ends: dict[int, QuantizedWeight] = {}
    for name, layer, own in list(rounded_layers(model, kind)):
        weight = ends.get(id(layer.weight)) or rounded(_out_first(layer, layer.weight), own)
        if own == "int8":
            ends[id(layer.weight)] = weight  # tied ones share it
        _replace(model, name, weight, dtype)
    matrices = {
        name: rounded(_out_first(model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)), kind)
        for name in rounded_experts(model)
    }
    _replace_experts(model, matrices)
    _keep_a_parameter(model, dtype)


@register_quantizer(METHOD)
class IntegerQuantizer(HfQuantizer):
    """Replaces layers by those that hold integers, before weights are read."""

    _dtype = torch.float32  # of all else
    _kinds: Mapping[str, Quantization] = {}  # what weights are rounded to when they are read, by name
    _experts: Sequence[str] = ()  # names of the matrices that are quantised

    quantization_config: IntegerConfig

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Take note of the model's dtype."""
        self._dtype = dtype or torch.get_default_dtype()
        return self._dtype

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] = (), **_: object
    ) -> None:
        if self.quantization_config.layers is not None:
            weights = dict(self.quantization_config.layers)
        elif self.pre_quantized:
            weights = dict(_stored(model, checkpoint_files))
        else:
            kind = self.quantization_config.kind or "int8"
            self._kinds = {f"{name}.weight": own for name, _, own in rounded_layers(model, kind)}
            self._kinds |= dict.fromkeys(rounded_experts(model), kind)
            weights = rounded_weights(model, kind)
        matrices = {name: weights.pop(name) for name, _ in list(expert_shapes(model)) if name in weights}
        parts: dict[str, str] = {}
        for name, source in model.all_tied_weights_keys.items():  # the file has one of the two
            weight = weights.get(source.removesuffix(".weight"))
            if weight is not None:
                weights[name.removesuffix(".weight")] = weight
                parts |= {_part(name, part): _part(source, part) for part in weight.parts() if part != "weight"}
        model.all_tied_weights_keys |= parts
        model._tied_weights_keys = {**(model._tied_weights_keys or {}), **parts}
        plan_parts(model, weights | matrices)
        experts = _replace_experts(model, matrices)
        for name, weight in weights.items():
            _replace(model, name, weight, self._dtype).make_parameters()
        for fresh in experts:
            fresh.make_parameters()
        for name in self._kinds:  # transformers 5.17 casts what it reads to the dtype of the parameter before rounding
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(self._dtype)
        self._experts = list(matrices)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> PreTrainedModel:
        self.quantization_config.layers = None
        keep_parts(model)
        for module in model.modules():
            if isinstance(module, QuantizedModule | QuantizedExperts):
                module.make_buffers()
        _keep_a_parameter(model, self._dtype)
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: object) -> bool:
        """Whether to call `get_quantize_ops` for a weight that is read."""
        return param_name in self._kinds

    def update_weight_conversions(
        self, weight_conversions: Sequence[WeightTransform], _: object = None
    ) -> Sequence[WeightTransform]:
        """Leave out what would transpose experts that are quantised already. transformers 5.17 gives no model."""
        if self._kinds:
            return weight_conversions
        return [
            each
            for each in weight_conversions
            if not isinstance(each, WeightConverter)
            or all(each.rename_source_key(name)[1] is None for name in self._experts)
        ]

    def get_quantize_ops(self) -> ConversionOps:
        """Return what rounds a weight."""
        return _Rounding(self._kinds)

    def is_serializable(self, *_: object, **__: object) -> bool:
        """The parameters are what is stored."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Integers have no gradients."""
        return False


def _keep_a_parameter(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give a model without parameters an empty one: transformers asks the first for the model's device and dtype."""
    if next(model.parameters(), None) is None:
        device = next(model.buffers()).device
        model.register_parameter(_EMPTY, nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False))
        model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), _EMPTY}


class _Rounding(ConversionOps):
    def __init__(self, kinds: Mapping[str, Quantization]) -> None:
        self._kinds = kinds

    def convert(self, input_dict: dict[str, Any], *_: object, model: Any = None, **__: object) -> dict[str, Any]:
        parts: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            module = get_module_from_name(model, name)[0]
            tensor = value[0] if isinstance(value, list) else value
            parts |= named_parts(name, rounded(_out_first(module, tensor), self._kinds[name]))
        return parts


def _part(weight: str, part: str) -> str:
    """Return the name of a part of a weight, by the weight's name."""
    return f"{weight.removesuffix('weight')}{part}" if weight.endswith(".weight") else part_name(weight, part)


def _out_first(module: nn.Module, weight: Tensor) -> Tensor:
    """Return [out, in] or [E, out, in]. weight: of the module, which may have it transposed."""
    return weight.mT if isinstance(module, Conv1D) or getattr(module, "is_transposed", False) else weight


def empty_weight(shape: Sequence[int], kind: Quantization) -> QuantizedWeight:
    """Return what `rounded` would, without numbers, on the meta device. shape: [out, in] or [E, out, in]."""
    *rows, size = shape
    bits, is_nf4 = BITS[kind], kind == "nf4"
    groups = size // (gcd(size, NF4_BLOCK) if is_nf4 else GROUP)
    with torch.device("meta"):
        return QuantizedWeight(
            codes=torch.empty(*rows, size * bits // 8, dtype=torch.uint8),
            scales=torch.empty(*rows, groups, dtype=torch.float32 if is_nf4 else torch.float16),
            offsets=None,
            bits=bits,
            table=torch.empty(16) if is_nf4 else None,
        )


def _stored(model: nn.Module, files: Sequence[str]) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the weights in files of safetensors, on the meta device, by the names of modules."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype(), torch.bfloat16)
                tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    sizes = {name: shape[-1] for name, shape in expert_shapes(model)}
    layers: dict[str, Any] = dict(model.named_modules())
    sizes |= {
        name: _out_first(layer, layer.weight).shape[1] for name, layer in layers.items() if can_be_quantized(layer)
    }
    for name in (name[: -len(_SCALES[0])] for name in tensors if name.endswith(_SCALES)):
        weight = f"{name}.weight" if f"{name}.weight" in tensors else name
        parts = [tensors.get(_part(weight, part)) for part in PARTS]
        if name in sizes and parts[0] is not None:
            yield name, weight_of(parts, 8 * parts[0].shape[-1] // sizes[name], floats=False)


def _replace_experts(model: PreTrainedModel, matrices: Mapping[str, QuantizedWeight]) -> list[QuantizedExperts]:
    weights: dict[str, dict[str, QuantizedWeight]] = {}
    for name, weight in matrices.items():
        path, _, matrix = name.rpartition(".")
        weights.setdefault(path, {})[matrix] = weight
    fresh = {path: QuantizedExperts(model.get_submodule(path), own) for path, own in weights.items()}
    for path, experts in fresh.items():
        model.set_submodule(path, experts)
    return list(fresh.values())


def _replace(model: PreTrainedModel, name: str, weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedModule:
    layer = model.get_submodule(name)
    fresh: QuantizedModule
    if isinstance(layer, nn.Embedding):
        fresh = QuantizedEmbedding(weight, dtype, getattr(layer, "scalar_embed_scale", 1.0))
    else:
        bias = getattr(layer, "bias", None)
        fresh = QuantizedLinear(weight, bias, dtype)
        fresh.is_transposed = isinstance(layer, Conv1D)
    model.set_submodule(name, fresh)
    return fresh
