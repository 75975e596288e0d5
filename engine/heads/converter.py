"""Turns pickled heads into a safetensors file, without running code that a pickle may contain."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file
from torch import Tensor

from decoding.errors import ConfigError

_SUFFIXES = {".pt", ".pth", ".bin"}


def convert(folder: Path) -> list[Path]:
    """Write a .safetensors file beside each pickled one in a folder, and return the new ones.

    Raises:
        ConfigError: there is nothing to convert, or a file holds more than tensors.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)
    if not files:
        raise ConfigError(f"{folder} has no {', '.join(sorted(_SUFFIXES))} file")
    return [_convert(file) for file in files]


def _convert(file: Path) -> Path:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise ConfigError(f"{file} can't be read as plain tensors: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ConfigError(f"{file} should be a dictionary of tensors")
    output = file.with_suffix(".safetensors")
    save_file({str(name): tensor.contiguous().clone() for name, tensor in loaded.items()}, output)
    return output
