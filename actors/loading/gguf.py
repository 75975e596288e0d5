"""Converts `.gguf` files, as llama.cpp uses them, into checkpoint folders that transformers loads.

Each file is converted once and kept in a cache. Knows nothing of devices, memory or requests.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from decoding.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_log = logging.getLogger(__name__)


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file."""
    return path.lower().endswith(".gguf")


def settings_folder(path: str) -> str:
    """Return a folder with the model's configuration and tokenizer: `path` itself, unless that is a GGUF file.

    A tokenizer beside the file comes before the one in it.

    Raises:
        ConfigError: the file is missing or broken, has no tokenizer, or is of an architecture that can't be read.
    """
    return _converted(Path(path), "settings", _save_settings) if is_gguf(path) else path


def weights_folder(path: str, dtype: str) -> str:
    """Return a folder with the model's weights: `path` itself, unless that is a GGUF file.

    dtype: of the stored weights, a torch dtype's name; "auto" is bfloat16. They are no longer quantised.

    Raises:
        ConfigError: as in `settings_folder`, or the disk is full.
    """
    if not is_gguf(path):
        return path
    name = "bfloat16" if dtype == "auto" else dtype
    return _converted(Path(path), name, lambda file, folder: _save_weights(file, folder, getattr(torch, name)))


def _converted(file: Path, kind: str, convert: Callable[[Path, Path], None]) -> str:
    """Return the folder that `convert` writes for a file. It appears whole or not at all."""
    if not file.is_file():
        raise ConfigError("there is no such file")
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = _cache_folder() / f"{file.stem}-{key}"
    folder = cache / kind
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{kind}.lock"):  # several replicas may start at once
            if not folder.is_dir():
                _log.warning("converting %s to %s, which is done once", file, folder)
                with tempfile.TemporaryDirectory(dir=cache) as unfinished:
                    convert(file, Path(unfinished) / kind)
                    (Path(unfinished) / kind).rename(folder)
    except Exception as error:  # what the readers of a broken file raise is not documented
        raise ConfigError(f"the file can't be converted: {error}") from error
    return str(folder)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort" / "gguf"


def _save_settings(file: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    beside = [other for name in _TOKENIZER_FILES if (other := file.parent / name).is_file()]
    for other in beside:
        shutil.copy(other, folder)
    if not beside:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _save_weights(file: Path, folder: Path, dtype: torch.dtype) -> None:
    quantization = GgufConfig(dequantize=True)
    result: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, quantization_config=quantization, output_loading_info=True
    )
    loaded, info = result
    if info["missing_keys"]:
        raise ConfigError(f"it lacks {len(info['missing_keys'])} weights, for example {min(info['missing_keys'])}")
    config = loaded.config
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    config.dtype = dtype
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)  # `loaded` counts as quantised and can't be saved
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
