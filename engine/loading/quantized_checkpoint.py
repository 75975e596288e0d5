"""Shows transformers a quantised checkpoint as one with the tensors of our own layers, which are made as it reads them.

Linear layers stay quantised. All else that is, such as experts, becomes plain weights.
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

from engine.kernels.quantized_weight import QuantizedWeight
from engine.loading.quantized_formats import Reader, StoredWeight
from engine.loading.text_model import RENAMED

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """What `from_pretrained` gets as `state_dict`, and the layers that stay quantised, on the meta device, by name."""

    tensors: Mapping[str, Any]
    layers: Mapping[str, QuantizedWeight]


class _Lazy:
    """A tensor that is made when it is read, as slices of safetensors are."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make

    def __getitem__(self, _: object) -> Tensor:
        return self._make()


class _Weight:
    """A quantised weight that is read with its first part, and forgotten with its last."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self._parts: dict[str, Tensor] = {}

    def parts(self, layer: str) -> dict[str, _Lazy]:
        """Return the layer's tensors by name."""
        return {f"{layer}.{part}": _Lazy(partial(self._take, part)) for part in self._stored.like.parts()}

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
    """Return what a folder or a Hub's repository has.

    skeleton: its model on the meta device. dtype: of plain weights. keeps_integers: False: all become plain.

    Raises:
        OSError: it has no file of safetensors.
        ConfigError: layers have a layout that is not read.
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
            tensors |= {f"{module}.{part}".removeprefix("."): value for part, value in parts.items()}
        elif layer is None:
            tensors[f"{module}.weight"] = _Lazy(partial(_plain, stored, dtype))
        else:
            layers[layer] = stored.like
            tensors |= _Weight(stored).parts(layer)
        if stored is not None and "bias" in parts:
            tensors[f"{module}.bias"] = parts["bias"]
    return QuantizedCheckpoint(tensors, layers)


def _plain(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    return stored.read().dequantized().to(dtype)


def _layer_finder(model: PreTrainedModel) -> Callable[[str], str | None]:
    """Return what finds the model's linear layer by a module's name in the files; None: it is no such layer."""
    transforms = get_model_conversion_mapping(model, RENAMED)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
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
