"""Converts `.gguf` files, as llama.cpp uses them, into checkpoint folders that transformers loads.

Each content is converted once and kept in a cache, wherever its file is. torch and transformers are imported late, so
that commands without them can ask what is converted.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from decoding.errors import ConfigError
from engine.loading.host import stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine.loading.gguf.header import Header, StoredTensor

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([^/]+\.gguf)", re.IGNORECASE)
_SIZES = "stored_bytes.json"  # by the dtype of what isn't quantised
_FORMAT = 10  # of the conversions; raised when they change
_RECOMMENDED = {  # keys below general.sampling that a file may have: transformers' names
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_DIGITS = 16  # of a digest, in names of folders
_STORED = "-stored"  # ends names of folders whose weights are quantised as in the file
# Bits that a weight takes in memory where it stays quantised (`blocks.py`), scales included.
_STORED_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q8_0": 8.5,
    "Q2_K": 8.0,
    "Q3_K": 6.0,
    "Q4_K": 6.0,
    "Q5_K": 10.0,
    "Q6_K": 10.0,
    "IQ4_NL": 4.5,
    "IQ4_XS": 5.0,
    "MXFP4": 5.0,
}
_FULL_BYTES = 32 * 2**20  # with less room left, the disk is the reason for a failure
_log = logging.getLogger(__name__)


def is_gguf(path: str) -> bool:
    """Whether a model's path names a GGUF file."""
    return path.lower().endswith(".gguf")


def hub_file(path: str) -> tuple[str, str] | None:
    """Return the repository and the name of a GGUF file on the Hub, `org/name/file.gguf`; None: the path is local."""
    match = _ON_HUB.fullmatch(path)
    return None if match is None or Path(path).is_file() else (match[1], match[2])


def local_file(path: str) -> Path | None:
    """Return a GGUF file on this machine, which may be in the Hub's cache; None if it is not here."""
    if (on_hub := hub_file(path)) is None:
        return Path(path) if Path(path).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(*on_hub)
    return Path(cached) if isinstance(cached, str) else None


def settings_folder(path: str) -> str:
    """Return a folder with the model's configuration and tokenizer: `path` itself, unless that is a GGUF file.

    A tokenizer beside the file comes before the one in it. A file on the Hub is downloaded.

    Raises ConfigError if the file is missing or broken, has no tokenizer, or is of an architecture that can't be read.
    """
    if not is_gguf(path):
        return path
    file = _downloaded(path)
    return _converted(file, _settings_of(file), _save_settings)


def weights_folder(path: str, dtype: str, *, unpacked: bool) -> str:
    """Return a folder with the model's weights: `path` itself, unless that is a GGUF file.

    Args:
        dtype: of the weights that aren't quantised, a torch dtype's name. "auto": bfloat16, or float32 where that would
            be slow: see `auto_dtype`.
        unpacked: whether to unpack quantised weights.

    Raises:
        ConfigError: as in `settings_folder`, or the disk is full.
    """
    if not is_gguf(path):
        return path
    save = partial(_save_weights, dtype=dtype, unpacked=unpacked)
    return _converted(_downloaded(path), dtype if unpacked else dtype + _STORED, save)


def converted_folder(path: str, dtype: str, *, unpacked: bool = False) -> Path | None:
    """Return the folder of a GGUF file's weights if it was converted before; None if not, or if there is no file.

    One with weights as they are stored comes before one with unpacked weights. unpacked: only the latter will do.
    """
    file = local_file(path) if is_gguf(path) else None
    kinds = [dtype] if unpacked else [dtype + _STORED, dtype]
    folders = [] if file is None else [_cache_of(file) / kind for kind in kinds]
    return next(filter(Path.is_dir, folders), None)


def read_stored_bytes(path: str, dtype: str) -> int:
    """Return how many bytes a GGUF file's weights take, quantised where they can be. dtype: of the others."""
    sizes: dict[str, int] = json.loads((Path(settings_folder(path)) / _SIZES).read_text(encoding="utf-8"))
    return sizes[dtype]


def has_integers(path: str) -> bool:
    """Whether a GGUF file has weights that can stay quantised."""
    return read_stored_bytes(path, "float32") < 2 * read_stored_bytes(path, "bfloat16")


def stored_bytes(tensors: "Iterable[StoredTensor]", item: int) -> int:
    """Return how many bytes tensors of a file take, quantised where they can be. item: bytes of each other number."""
    bits = 0.0
    for tensor in tensors:
        bits += math.prod(tensor.shape) * _STORED_BITS.get(tensor.kind.name, 8.0 * item)
    return int(bits / 8)


def auto_dtype(path: str, config: "PretrainedConfig") -> str:
    """Return the dtype of a GGUF file's weights for "auto", by name: as they were converted before, or would be."""
    folder = converted_folder(path, "auto")
    if folder is not None:
        dtype: str = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]
        return dtype
    return "bfloat16" if _computes_bfloat16_fast(config) else "float32"


def _downloaded(path: str) -> Path:
    """Return the file on this machine. One in the Hub's cache is taken without asking the Hub for a newer one."""
    on_hub, here = hub_file(path), local_file(path)
    if on_hub is None or here is not None:
        return here or Path(path)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(*on_hub))
    except Exception as error:  # also those of the HTTP library
        raise ConfigError(f"there is no file {path!r} here, and it can't be had from the Hub: {error}") from error


def _converted(file: Path, kind: str, convert: Callable[[Path, Path], None]) -> str:
    """Return the folder that `convert` writes for a file. It appears whole or not at all."""
    if not file.is_file():
        raise ConfigError("there is no such file")
    cache = _cache_of(file)
    folder, unfinished = cache / kind, cache / f"{kind}.unfinished"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{kind}.lock"):  # several replicas may start at once
            if not folder.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
                _log.warning("converting %s to %s, which is done once", file, folder)
                stages.info("converting %s, once", file.name)
                try:
                    convert(file, unfinished)
                    unfinished.rename(folder)
                except Exception as error:
                    raise _explained(error, cache) from error
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except Exception as error:  # what the readers of a broken file raise is not documented
        raise ConfigError(f"{file.name} can't be converted: {error}") from error
    return str(folder)


def _explained(error: Exception, cache: Path) -> Exception:
    """Return what to tell of a failed conversion."""
    if shutil.disk_usage(cache).free < _FULL_BYTES or getattr(error, "errno", None) == errno.ENOSPC:
        return ConfigError(f"the disk of {cache} is full ({error}); make room, or set XDG_CACHE_HOME to another folder")
    return error


def _cache_of(file: Path) -> Path:
    """Return the folder of a content's conversions: copies of a file share it, as in several environments."""
    return _caches() / f"{file.stem}-{_digest(file)[:_DIGITS]}-{_FORMAT}"


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "consort" / "gguf"


def _digest(file: Path) -> str:
    """Return the digest of a file's content. It is kept for the file's path, size and time: large files take long."""
    status = file.stat()
    state = hashlib.sha256(f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode())
    kept = _caches() / "digests" / state.hexdigest()[:_DIGITS]
    with suppress(OSError):
        return kept.read_text()
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    with suppress(OSError):  # a cache that can't be written to
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as unfinished:
            unfinished.write(digest)
        Path(unfinished.name).rename(kept)
    return digest


def _beside(file: Path) -> list[Path]:
    return [other for name in _TOKENIZER_FILES if (other := file.parent / name).is_file()]


def _settings_of(file: Path) -> str:
    """Return the name of the folder of a file's settings, another one for each tokenizer beside it."""
    digest = hashlib.sha256()
    for other in _beside(file):
        digest.update(f"{other.name}|{other.stat().st_size}|".encode() + other.read_bytes())
    return f"settings-{digest.hexdigest()[:_DIGITS]}" if _beside(file) else "settings"


def _save_settings(file: Path, folder: Path) -> None:
    from transformers import GenerationConfig

    from engine.loading.gguf.header import Header
    from engine.loading.gguf.tokenizer import end_tokens, make_tokenizer
    from engine.loading.gguf.weights import make_config, place_weights

    header = Header(file)
    config = make_config(header)
    place_weights(header, config)
    config.save_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = end_tokens(header) or None
    generation.update(**_recommended_sampling(header))
    generation.save_pretrained(folder)
    tensors = header.tensors.values()
    sizes = {name: stored_bytes(tensors, item) for name, item in (("float32", 4), ("bfloat16", 2), ("float16", 2))}
    (folder / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
    beside = _beside(file)
    for other in beside:
        shutil.copy(other, folder)
    if not beside:
        make_tokenizer(header).save_pretrained(folder)


def _recommended_sampling(header: "Header") -> dict[str, float]:
    """Return the sampling that a file recommends, by transformers' names. Numbers are stored as float32."""
    stored = {name: header.fields.get(f"general.sampling.{key}") for key, name in _RECOMMENDED.items()}
    given = {name: round(value, 6) for name, value in stored.items() if value is not None}
    if not given:
        return {}
    return {"do_sample": False} if given.get("temperature") == 0 else {"do_sample": True, **given}


def _computes_bfloat16_fast(config: "PretrainedConfig") -> bool:
    """Whether bfloat16 is fast here. CPUs without instructions for it need our kernel, which computes no experts."""
    import torch

    from engine.layers.linear import has_kernel

    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    if not has_kernel(torch.empty(2, 2, dtype=torch.bfloat16)):
        return False
    return not any("experts" in name and value for name, value in config.to_dict().items())


def _save_weights(file: Path, folder: Path, *, dtype: str, unpacked: bool) -> None:
    import torch
    from safetensors.torch import save_file

    from engine.loading.gguf.header import Header
    from engine.loading.gguf.weights import make_config, place_weights, read_weights, stored_weights
    from engine.loading.quantizer import IntegerConfig, named_parts

    header = Header(file)
    config = make_config(header)
    model, placements = place_weights(header, config)
    torch_dtype = getattr(torch, auto_dtype(str(file), config) if dtype == "auto" else dtype)
    config.dtype = torch_dtype
    stored = {} if unpacked else stored_weights(header, placements, model)
    others = [placement for placement in placements if placement.weight not in stored]
    weights = dict(read_weights(header, others, config, torch_dtype))
    if stored:
        for name, weight in stored.items():
            weights |= named_parts(name, weight)
        config.quantization_config = IntegerConfig()
        config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    model.load_state_dict(weights, strict=False, assign=True)  # all that aren't tied
    model.tie_weights()
    model.save_pretrained(folder)
