"""Reads the tensors and the configuration of heads from a folder or the Hub. Knows nothing of what they mean."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decoding.errors import ConfigError
from engine.heads.spec import HeadsSpec

_PICKLED = ("*.pt", "*.bin", "*.pth")
_SHOWN = 4


class HeadsCheckpoint(NamedTuple):
    """What a folder has: tensors by name, and config.json, which may be empty."""

    spec: HeadsSpec
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the key and the path."""
        return ConfigError(f"{self.spec.name}.path: {self.spec.path!r}: {problem}")

    def check_names(self, expected: Iterable[str], *, ignored: Collection[str] = ()) -> None:
        """Raise ConfigError if tensors are missing or surplus."""
        wanted = set(expected)
        for names, problem in (
            (wanted - set(self.tensors), "lacks"),
            (set(self.tensors) - wanted - set(ignored), "has tensors that do not belong there:"),
        ):
            if names:
                shown = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
                raise self.error(f"{problem} {shown}")

    def check_shape(self, name: str, *shape: int) -> Tensor:
        """Return a tensor; raise ConfigError unless it has this shape."""
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise self.error(f"{name} has the shape {list(tensor.shape)}, but this target needs {list(shape)}")
        return tensor


def read_checkpoint(spec: HeadsSpec) -> HeadsCheckpoint:
    """Read heads.

    Raises:
        ConfigError: there is no such folder or repository, or it has no safetensors file.
    """
    folder = _folder(spec)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        advice = f"; it has {pickled[0]}, which could run code: `consort convert-heads {folder}`" if pickled else ""
        raise ConfigError(f"{spec.name}.path: {spec.path!r} has no .safetensors file{advice}")
    try:
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{spec.name}.path: can't read {spec.path!r}: {error}") from error
    return HeadsCheckpoint(spec, tensors, config)


def _folder(spec: HeadsSpec) -> Path:
    if Path(spec.path).is_dir():
        return Path(spec.path)
    try:
        patterns = ["config.json", "*.safetensors"]
        return Path(snapshot_download(spec.path, revision=spec.revision, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"{spec.name}.path: can't load {spec.path!r}: {error}") from error
