"""The keys of a GGUF file, and the names, shapes and positions of its tensors.

The format is that of ggml's docs/gguf.md. The reader of the gguf package makes an array for each token of a vocabulary,
which takes ten seconds for 262,144 of them; this one takes half a second.
"""

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from decoding.errors import ConfigError

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_PLAIN = {"F16": np.float16, "F32": np.float32}  # types of tensors that are numbers, not blocks
_ALIGNMENT = 32  # bytes, where the file names no other


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file."""

    shape: tuple[int, ...]  # as torch counts: rows first
    kind: GGMLQuantizationType
    data: NDArray[Any]  # a view of the file: numbers, or bytes [..., bytes of a row]

    def values(self) -> NDArray[np.float32]:
        """Return the tensor's numbers."""
        if self.kind.name in _PLAIN:
            return self.data.astype(np.float32)
        return dequantize(self.data, self.kind).reshape(self.shape)


class Header:
    """A file's keys and tensors. `take` removes keys, so the remaining ones are those that nobody has read."""

    def __init__(self, file: Path) -> None:
        """Raise ConfigError if the file is broken, one part of several, or names no architecture."""
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise ConfigError("it does not begin like a GGUF file")
            self._bytes = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 4
        version = self._number(4)
        if version not in _VERSIONS:
            raise ConfigError(f"its version is {version}; only {_VERSIONS} can be read")
        tensors, keys = self._number(10), self._number(10)
        self.fields: dict[str, Any] = {self._string(): self._value(self._number(4)) for _ in range(keys)}
        self._entries = [self._entry() for _ in range(tensors)]
        if "general.architecture" not in self.fields:
            raise ConfigError("it names no architecture (general.architecture)")
        self.architecture: str = self.fields["general.architecture"]
        if self.fields.get("split.count", 1) > 1:
            raise ConfigError("it is one part of a model; merge the parts with llama-gguf-split --merge")
        prefix = f"{self.architecture}."
        self._rest = {key.removeprefix(prefix): value for key, value in self.fields.items() if key.startswith(prefix)}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name, in the file's order."""
        alignment = self.fields.get("general.alignment", _ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        return {name: self._tensor(shape, kind, start + offset) for name, shape, kind, offset in self._entries}

    def _tensor(self, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> StoredTensor:
        block, size = GGML_QUANT_SIZES[kind]
        count = prod(shape) // block * size
        if start + count > len(self._bytes):
            raise ConfigError("it ends within its tensors")
        data: NDArray[Any] = np.frombuffer(self._bytes, np.uint8, count, start)
        if kind.name in _PLAIN:
            return StoredTensor(shape, kind, data.view(_PLAIN[kind.name]).reshape(shape))
        return StoredTensor(shape, kind, data.reshape(*shape[:-1], -1))

    def _entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Return a tensor's name, shape, type and offset."""
        name = self._string()
        shape = tuple(self._number(10) for _ in range(self._number(4)))[::-1]
        return name, shape, GGMLQuantizationType(self._number(4)), self._number(10)

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        numbers = np.frombuffer(self._bytes, _NUMBERS[kind], count, self._position)
        self._position += numbers.nbytes
        return numbers

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        content, position, texts = self._bytes, self._position, []
        size_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = position + 8
            position = begin + size_of(content, position)[0]
            texts.append(content[begin:position].decode())
        if position > len(content):
            raise ConfigError("it ends within its keys")
        self._position = position
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(kind)
        kind, count = self._number(4), self._number(10)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return self._strings(count) if kind == _STRING else self._numbers(kind, count).tolist()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, without the architecture's name before it."""
        return self._rest.pop(key, default)

    def take_below(self, prefix: str) -> dict[str, Any]:
        """Return the values of all keys with this prefix, by the rest of their names."""
        return {key.removeprefix(prefix): self.take(key) for key in [*self._rest] if key.startswith(prefix)}

    def take_per_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """Return a value for each layer; the file may give one for all."""
        value = self.take(key, default)
        return list(value)[:layers] if isinstance(value, list) else [value] * layers

    def remaining(self) -> dict[str, Any]:
        """Return the keys that were not taken, except those whose value is 0, false or empty."""
        return {key: value for key, value in self._rest.items() if value}

    def has(self, ending: str) -> bool:
        """Whether any tensor's name has this ending."""
        return any(name.endswith(ending) for name in self.tensors)

    def layers_with(self, name: str, layers: int) -> list[bool]:
        """Return for each layer whether it has a tensor. name: what follows "blk.N."."""
        return [f"blk.{layer}.{name}" in self.tensors for layer in range(layers)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as torch counts: rows first. Raises ConfigError if there is no such tensor."""
        if name not in self.tensors:
            raise ConfigError(f"it lacks {name}")
        return self.tensors[name].shape
