"""Lets transformers load other tools' quantised checkpoints into our own layers. It makes tensors when they are read.

Linear layers and experts stay quantised. Other quantised weights become plain ones.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.latent import PROJECTION
from engine.loading.quantized_formats import Reader, StoredWeight
from engine.loading.quantizer import complete_experts, expert_shapes, named_parts
from engine.loading.text_model import RENAMED

_UNUSED = ".k_scale", ".v_scale", ".q_scale", ".input_scale", ".output_scale"  # of activations, which stay in `dtype`
_PLAIN = ".dt_proj.weight", f".{PROJECTION}.weight"  # Mamba 1 multiplies its weight by itself; latents run both ways
_OF_EXPERTS = re.compile(r"((?:gate_|up_|gate_up_|down_)proj)(?:_(blocks|scales|scale_inv|scale))?")  # of all at once
_OF_BITSANDBYTES = re.compile(r"(.+)\.((?:nested_)?(?:absmax|quant_map)|quant_state\.\w+)")
_PARTS_OF_EXPERTS = {None: "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv"}
_LEAST_GROUP = 8  # inputs; kernels take multiples of it
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The `state_dict` for `from_pretrained`, and the layers that stay quantised, by name, on the meta device."""

    tensors: Mapping[str, Any]
    layers: Mapping[str, QuantizedWeight]


class _Lazy:
    """A tensor that is made when it is read, like slices of safetensors."""

    def __init__(self, shape: Sequence[int], make: Callable[[], Tensor]) -> None:
        self._shape, self._make = list(shape), make

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        whole = self._make()
        part = whole[index]
        return part.clone() if part.nbytes < whole.nbytes else part  # does not keep the rest


class _Weight:
    """A quantised weight that is read when its first part is taken, and dropped with its last."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self._parts: dict[str, Tensor] = {}
        self._untaken = set(stored.like.parts())
        self._lock = Lock()  # threads read

    def parts(self, name: str) -> dict[str, _Lazy]:
        """Return its tensors by name. name: of the weight."""
        names = zip(named_parts(name, self._stored.like), self._stored.like.parts().items(), strict=True)
        return {full: _Lazy(like.shape, partial(self._take, part)) for full, (part, like) in names}

    def _take(self, part: str) -> Tensor:
        with self._lock:
            if part not in self._parts:  # it is read again for the second of two pieces, as of experts
                parts = self._stored.read().parts()
                self._parts = {name: parts[name] for name in self._untaken | {part}}
            self._untaken.discard(part)
            return self._parts.pop(part)


def open_checkpoint(
    path: str,
    revision: str | None,
    read: Reader,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    *,
    keeps_integers: bool = True,
    ranks: int = 1,
) -> QuantizedCheckpoint:
    """Open the quantised checkpoint of a folder or of a repository on the Hub.

    skeleton: its model on the meta device. dtype: of plain weights. keeps_integers: False: all become plain.
    ranks: that each have a part of every layer.

    Raises OSError if it has no file of safetensors; ConfigError if layers have a layout that can't be read.
    """
    sources: dict[str, dict[str, Any]] = defaultdict(dict)  # parts by the names of weights
    names: dict[str, dict[str, str]] = defaultdict(dict)  # in the files, by the same
    for file in _files(path, revision):
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            weight, part = _split(name)
            sources[weight][part], names[weight][part] = opened.get_slice(name), name
    stored = {weight: each for weight, parts in sources.items() if (each := read(parts)) is not None}
    kept = _Finder(skeleton, stored).find()
    if not keeps_integers:
        kept = kept._replace(layers={}, weights=set())
    tensors: dict[str, Any] = {}
    layers = {name: matrix.regrouped(ranks) for name, matrix in kept.layers.items()}
    for name, matrix in layers.items():
        tensors |= _Weight(matrix).parts(name)
    for weight, parts in sources.items():
        if weight not in stored:
            plain = {names[weight][part]: value for part, value in parts.items()}
            for name, tensor in plain.items():
                if tensor.get_dtype().startswith("F8"):
                    raise ConfigError(f"{name} is FP8 without a known scale")
            tensors |= {name: value for name, value in plain.items() if not name.endswith(_UNUSED)}
        elif weight not in kept.weights:
            tensors[weight] = _plain(stored[weight], dtype, is_turned=weight in kept.turned)
        if weight in stored and "bias" in parts:
            tensors[names[weight]["bias"]] = parts["bias"]
    likes = {name.removesuffix(".weight"): matrix.like for name, matrix in layers.items()}
    return QuantizedCheckpoint(tensors, likes)


def _split(name: str) -> tuple[str, str]:
    """Return the name of a weight, and which part of it a tensor of that name is."""
    if (known := _OF_BITSANDBYTES.fullmatch(name)) is not None:
        return known[1], known[2]
    module, _, last = name.rpartition(".")
    of_experts = _OF_EXPERTS.fullmatch(last)
    if of_experts is None:
        return f"{module}.weight", last
    return f"{module}.{of_experts[1]}", _PARTS_OF_EXPERTS.get(of_experts[2], of_experts[2])


def _plain(stored: StoredWeight, dtype: torch.dtype, *, is_turned: bool) -> _Lazy:
    is_turned |= stored.is_turned

    def read() -> Tensor:
        weight = stored.read().dequantized().to(dtype)
        return weight.mT if is_turned else weight

    shape = torch.empty(stored.like.shape, device="meta")
    return _Lazy((shape.mT if is_turned else shape).shape, read)


class _Kept(NamedTuple):
    layers: Mapping[str, StoredWeight]  # by the names of the model's weights
    weights: set[str]  # of the files, which these are made of
    turned: set[str]  # of the files, of layers whose own are transposed


class _Finder:
    """Finds the linear layers and experts that weights in files belong to."""

    def __init__(self, model: PreTrainedModel, stored: Mapping[str, StoredWeight]) -> None:
        self._model, self._stored = model, stored
        transforms = get_model_conversion_mapping(model, RENAMED)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def find(self) -> _Kept:
        model, known, shapes = self._model, self._model.state_dict(), dict(expert_shapes(self._model))
        modules = {f"{name}.weight": type(module) for name, module in model.named_modules()}
        turned: set[str] = set()
        layers: dict[str, StoredWeight] = {}
        parts: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))  # of experts' matrices
        for weight in sorted(self._stored, key=dot_natural_key):
            name, pattern = rename_source_key(weight, self._renamings, self._converters, model.base_model_prefix, known)
            if name in shapes:
                parts[name][pattern].append(weight)
            elif pattern is None and modules.get(name) in (nn.Linear, Conv1D):
                if modules[name] is Conv1D:
                    turned.add(weight)
                if not name.endswith(_PLAIN) and self._stored[weight].like.group % _LEAST_GROUP == 0:
                    layers[name] = self._stored[weight]
                    parts[name][None] = [weight]
        matrices = {name: self._matrix(parts[name], name, shapes[name]) for name in parts if name in shapes}
        layers |= {name: matrix for name, matrix in matrices.items() if matrix is not None}
        layers = complete_experts(model, layers)
        made_of = {weight for name in layers for part in parts[name].values() for weight in part}
        return _Kept(layers, made_of, turned)

    def _matrix(self, parts: Mapping[str | None, list[str]], name: str, shape: tuple[int, ...]) -> StoredWeight | None:
        """Return a matrix of all experts; None: the weights in files don't make one.

        parts: their names, by the pattern of the converter that would merge them.
        """
        converter = next((each for each in self._converters if parts.keys() & set(each.source_patterns)), None)
        patterns = [None] if converter is None else converter.source_patterns
        operations = [] if converter is None else converter.operations
        rows = [[self._stored[weight] for weight in parts.get(pattern, ())] for pattern in patterns]
        stored = [each for row in rows for each in row]
        experts: Any = self._model.get_submodule(name.rpartition(".")[0])
        if (
            not all(isinstance(each, MergeModulelist | Concatenate) for each in operations)
            or len({len(row) for row in rows}) > 1
            or not all(each.like.order is None and each.like.can_join(stored[0].like) for each in stored)
            or any(each.is_turned != experts.is_transposed for each in stored)
        ):
            return None
        like = _matrices([[each.like for each in row] for row in rows])
        if like.shape != shape:
            return None
        return StoredWeight(like, lambda: _matrices([[each.read() for each in row] for row in rows]))


def _matrices(rows: Sequence[Sequence[QuantizedWeight]]) -> QuantizedWeight:
    """Return the matrices [E, out, in] of experts. rows: what stands one below the other, of each expert or of all."""
    return QuantizedWeight.joined([QuantizedWeight.stacked(row) if len(row[0].shape) == 2 else row[0] for row in rows])


def _files(path: str, revision: str | None) -> Sequence[str]:
    single = cached_file(path, _SINGLE, revision=revision, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [single]
    index = cached_file(path, _INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise OSError(f"quantised weights are read from {_SINGLE}, or from files that {_INDEX} names; it has neither")
    shards: Sequence[str] = get_checkpoint_shard_files(path, index, revision=revision)[0]
    return shards
