"""Lets transformers load other tools' quantised checkpoints into our own layers. It makes tensors when they are read.

Linear layers stay quantised. Other quantised weights, such as experts, become plain ones.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight
from engine.loading.quantized_formats import Reader, StoredWeight
from engine.loading.text_model import RENAMED

_UNUSED = ".k_scale", ".v_scale", ".q_scale", ".input_scale", ".output_scale"  # of activations, which stay in `dtype`
_MULTIPLIED = ".dt_proj"  # Mamba 1 multiplies its weight by itself
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
        return self._make()[index]


class _Weight:
    """A quantised weight that is read when its first part is taken, and dropped with its last."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self._parts: dict[str, Tensor] = {}

    def parts(self, layer: str) -> dict[str, _Lazy]:
        """Return the layer's tensors by name."""
        parts = self._stored.like.parts().items()
        return {f"{layer}.{part}": _Lazy(like.shape, partial(self._take, part)) for part, like in parts}

    def _take(self, part: str) -> Tensor:
        if not self._parts:
            self._parts = self._stored.read().parts()
        return self._parts.pop(part)


def open_checkpoint(
    path: str,
    revision: str | None,
    read: Reader,
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    *,
    keeps_integers: bool = True,
) -> QuantizedCheckpoint:
    """Open the quantised checkpoint of a folder or of a repository on the Hub.

    skeleton: its model on the meta device. dtype: of plain weights. keeps_integers: False: all become plain.

    Raises:
        OSError: it has no file of safetensors.
        ConfigError: layers have a layout that can't be read.
    """
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    for file in _files(path, revision):
        opened: Any = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            module, _, part = name.rpartition(".")
            modules[module][part] = opened.get_slice(name)
    layer_of = _layer_finder(skeleton) if keeps_integers else lambda _: None
    tensors: dict[str, Any] = {}
    layers: dict[str, QuantizedWeight] = {}
    for module, parts in modules.items():
        stored = read(parts)
        layer = None if stored is None else layer_of(module)
        if stored is None:
            named = {f"{module}.{part}".removeprefix("."): value for part, value in parts.items()}
            _check_plain(named)
            tensors |= {name: value for name, value in named.items() if not name.endswith(_UNUSED)}
        elif layer is None:
            tensors[f"{module}.weight"] = _Lazy(stored.like.shape, partial(_plain, stored, dtype))
        else:
            layers[layer] = stored.like
            tensors |= _Weight(stored).parts(layer)
        if stored is not None and "bias" in parts:
            tensors[f"{module}.bias"] = parts["bias"]
    return QuantizedCheckpoint(tensors, layers)


def _check_plain(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor.get_dtype().startswith("F8"):
            raise ConfigError(f"{name} is FP8 without a known scale")


def _plain(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    return stored.read().dequantized().to(dtype)


def _layer_finder(model: PreTrainedModel) -> Callable[[str], str | None]:
    """Return a function from a module's name in the files to that of the model's linear layer, or to None."""
    transforms = get_model_conversion_mapping(model, RENAMED)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not name.endswith(_MULTIPLIED)
    }
    known = model.state_dict()

    def find(module: str) -> str | None:
        name, merged = rename_source_key(f"{module}.weight", renamings, converters, model.base_model_prefix, known)
        return name.removesuffix(".weight") if merged is None and name in linear else None

    return find


def _files(path: str, revision: str | None) -> Sequence[str]:
    single = cached_file(path, _SINGLE, revision=revision, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [single]
    index = cached_file(path, _INDEX, revision=revision, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise OSError(f"quantised weights are read from {_SINGLE}, or from files that {_INDEX} names; it has neither")
    shards: Sequence[str] = get_checkpoint_shard_files(path, index, revision=revision)[0]
    return shards
