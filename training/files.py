"""Files and folders that appear whole or not at all."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from decoding.errors import ConfigError

_NOTHING_BYTES = 1 << 20  # less than this is a full disk


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises ConfigError if the disk is full."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise _full(path.parent) from error
        raise
    unfinished.replace(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` once it is filled. Raises ConfigError if the disk is full."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    remove(unfinished)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException as error:
        is_full = isinstance(error, Exception) and shutil.disk_usage(folder.parent).free < _NOTHING_BYTES
        remove(unfinished)
        if is_full:
            raise _full(folder.parent) from error
        raise
    remove(folder)
    unfinished.rename(folder)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there. Its name goes first, so that no part of it looks whole."""
    if folder.exists():
        removed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed)


def write_checkpoint(tensors: Mapping[str, Tensor], config: Mapping[str, object], folder: Path) -> None:
    """Write model.safetensors, floating tensors as bfloat16, and config.json into a folder."""
    written = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().clone()
        for name, tensor in tensors.items()
    }
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _full(folder: Path) -> ConfigError:
    return ConfigError(f"{folder}: the disk is full; make room and run the same command again")
