"""New weights for a running model: whether they fit it, and how they get under its packed layers."""

import ctypes
import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import QuantizedWeight
from engine.layers.faster_layers import use_faster_layers
from engine.layers.lora import LoraLayers, LoraLinear
from engine.loading.checkpoint import ModelSpec, load_config, load_model, read_weights
from engine.loading.gguf.files import is_gguf, settings_folder
from engine.model.runner import Runner

_FILES = (".json", ".safetensors", ".gguf", ".bin")  # that decide what a checkpoint computes
_SAMPLES, _SAMPLE_BYTES = 256, 4096  # of each file
_IGNORED = {"_name_or_path", "transformers_version", "architectures", "use_cache"}  # they change no text


def digest_of(path: str) -> str:
    """Return a digest of a checkpoint's files: of their names, their sizes and samples of their content.

    path: a folder or a .gguf file.

    Raises ConfigError if there is none.
    """
    root, digest = Path(path), blake2b(digest_size=4)
    files = [root] if root.is_file() else sorted(root.iterdir()) if root.is_dir() else []
    kept = [file for file in files if file.suffix in _FILES]
    if not kept:
        raise ConfigError(f"{path!r} is no folder with weights, and no .gguf file")
    for file in kept:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_weights(spec: ModelSpec, path: str) -> None:
    """Raise ConfigError if a checkpoint can't replace a model's. No weights are read, only what there is of them.

    spec: what the model was loaded by.
    """
    if is_gguf(path) != is_gguf(spec.path):
        kind = ".gguf file" if is_gguf(spec.path) else "folder"
        raise ConfigError(f"{path!r} is no {kind}, but {spec.name!r} was loaded from one")
    fresh = _spec_of(spec, path)
    present, given = load_config(spec).to_dict(), load_config(fresh).to_dict()
    if spec.dtype != "auto":
        present["dtype"] = given["dtype"] = spec.dtype
    for key in sorted((present.keys() | given.keys()) - _IGNORED):
        if present.get(key) != given.get(key):
            raise ConfigError(f"{path!r} is of another model: {key} is {given.get(key)!r}, not {present.get(key)!r}")
    tokens, own = _tokens(path, None), _tokens(spec.path, spec.revision)
    if None not in (tokens, own) and tokens != own:
        raise ConfigError(f"{path!r} has another tokenizer.json; new weights must be for the same tokens")
    new, old = (_kinds(read_weights(each, device_map={"": "meta"})) for each in (fresh, spec))
    if new != old:
        name = min(name for name in new.keys() | old.keys() if new.get(name) != old.get(name)).rpartition(".")[0]
        raise ConfigError(
            f"{path!r} stores {name} in another format; new weights must be stored as the present ones are"
        )


def _kinds(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(model)}


def _spec_of(spec: ModelSpec, path: str) -> ModelSpec:
    return replace(spec, path=path, revision=None, adapter=None) if path else spec


def _tokens(path: str, revision: str | None) -> list[Any] | None:
    """Return what a tokenizer's file says of its tokens; None: there is no such file."""
    folder = settings_folder(path)
    file = cached_file(folder, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    return [content.get("model"), content.get("added_tokens")]


class ReplaceableWeights:
    """The weights of a running model, which may be replaced between two steps, or left out for a while."""

    def __init__(self, runner: Runner, spec: ModelSpec) -> None:
        """spec: what the model was loaded by."""
        self.runner, self._spec = runner, spec
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext  # while which other models don't run here

    def load(self, path: str, digest: str) -> None:
        """Replace the weights by those of a checkpoint. An error leaves the present ones in place.

        path: a folder or a .gguf file; empty: what the model was loaded from. digest: of its files; empty: any.

        Raises ConfigError, OSError if they can't be loaded, or are not those of the digest; ValueError if they are of
        another model. Raises RuntimeError if there is too little memory for them and the present ones together.
        """
        if digest and digest_of(path) != digest:
            raise ConfigError(f"{path!r} has changed since it was announced; load it again")
        with self.alone():
            publish_weights(self.runner, self._spec, path)

    def drop(self) -> None:
        """Give the memory of weights and cache back to the system until `load`. Nothing may run before.

        Raises ConfigError if the model is not on a CPU, where tensors keep their addresses without memory.
        """
        if self.runner.device.type != "cpu":
            raise ConfigError(f"a model on {self.runner.device} can't sleep; only those on CPUs can")
        self.runner.cache.forget_texts()
        _release(tensor for _, tensor in named_tensors(self.runner.model))
        _release(self.runner.cache.memory())


def _release(tensors: Iterable[Tensor]) -> None:
    """Give back the memory pages that tensors fill. They stay where they are, and hold zeros or what a file holds."""
    system = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0 and system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "memory can't be given back")


def publish_weights(runner: Runner, spec: ModelSpec, path: str) -> None:
    """Put the weights of a checkpoint into a running model. Errors as in `ReplaceableWeights.load`.

    spec: what the model was loaded by.
    """
    dtype = str(runner.model.dtype).removeprefix("torch.")
    fresh = load_model(replace(_spec_of(spec, path), dtype=dtype))
    lora = None
    if runner.lora is not None:
        lora = LoraLayers(fresh, slots=1, rank=spec.max_adapter_rank, deterministic=spec.deterministic)
    use_faster_layers(fresh, deterministic=spec.deterministic, lora=lora)
    copy_weights(runner.model, fresh.eval())
    runner.cache.forget_texts()


@torch.inference_mode()
def copy_weights(model: nn.Module, source: nn.Module) -> None:
    """Copy all tensors of `source` into a model of the same layers, packed ones too, where graphs and traces read them.

    Raises ValueError if they are not alike. Nothing was copied then.
    """
    present, fresh = dict(named_tensors(model)), dict(named_tensors(source))
    if present.keys() != fresh.keys():
        name = min(present.keys() ^ fresh.keys())
        raise ValueError(f"the new weights {'lack' if name in present else 'have'} {name}: they are of other layers")
    for name, old in present.items():
        new = fresh[name]
        if (old.shape, old.dtype, old.device, old.layout) != (new.shape, new.dtype, new.device, new.layout):
            raise ValueError(
                f"the new weight {name} is {new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)}"
            )
    for name, old in present.items():
        old.copy_(fresh[name])


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers, and the tensors that are attributes of modules: faster layers have those.

    Those of adapters are left out.
    """
    adapters = {
        part for module in model.modules() if isinstance(module, LoraLinear) for part in (module.down, module.up)
    }
    for path, module in model.named_modules():
        own = {} if module in adapters or isinstance(module, LoraLinear) else vars(module)
        held = {**own, **own.get("_parameters", {}), **own.get("_buffers", {})}
        for name, value in held.items():
            for index, tensor in enumerate(_tensors_in(value)):
                yield f"{path}.{name}.{index}".removesuffix(".0"), tensor


def _tensors_in(value: object) -> Iterator[Tensor]:
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for part in value:
                yield from _tensors_in(part)
        case QuantizedWeight():
            for field in fields(value):
                yield from _tensors_in(getattr(value, field.name))
