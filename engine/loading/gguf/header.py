"""What a GGUF file says of its model: keys below its architecture's name, and its tensors' names and shapes."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderTensor

from decoding.errors import ConfigError


class Header:
    """A file's keys and tensors. Keys that were taken are gone, so that the rest is what nobody asked for."""

    def __init__(self, file: Path) -> None:
        """Raise ConfigError if the file is one part of several, or names no architecture."""
        self.reader = GGUFReader(file)
        fields = self.reader.fields
        if "general.architecture" not in fields:
            raise ConfigError("it names no architecture (general.architecture)")
        self.architecture: str = fields["general.architecture"].contents()
        if "split.count" in fields and fields["split.count"].contents() > 1:
            raise ConfigError("it is one part of a model; put the parts together by llama-gguf-split --merge")
        prefix = f"{self.architecture}."
        self._rest = {
            key.removeprefix(prefix): field.contents() for key, field in fields.items() if key.startswith(prefix)
        }
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self.reader.tensors}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, without the architecture's name before it."""
        return self._rest.pop(key, default)

    def take_below(self, prefix: str) -> dict[str, Any]:
        """Return the values of all keys that begin so, by the rest of their names."""
        return {key.removeprefix(prefix): self.take(key) for key in [*self._rest] if key.startswith(prefix)}

    def take_per_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """Return a value for each layer; the file may give one for all."""
        value = self.take(key, default)
        return list(value)[:layers] if isinstance(value, list) else [value] * layers

    def remaining(self) -> dict[str, Any]:
        """Return the keys that were not taken and say something: 0, false and empty values say nothing."""
        return {key: value for key, value in self._rest.items() if value}

    def has(self, ending: str) -> bool:
        """Whether any tensor's name ends so."""
        return any(name.endswith(ending) for name in self.tensors)

    def layers_with(self, name: str, layers: int) -> list[bool]:
        """Return whether each layer has a tensor. name: what follows "blk.N."."""
        return [f"blk.{layer}.{name}" in self.tensors for layer in range(layers)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as torch counts: rows first.

        Raises:
            ConfigError: there is no such tensor.
        """
        if name not in self.tensors:
            raise ConfigError(f"it lacks {name}")
        return tuple(int(size) for size in reversed(self.tensors[name].shape.tolist()))
