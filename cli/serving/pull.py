"""`consort pull` and `consort quantize`: get models ready for serving, with progress."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console

from cli.serving.progress import reporting
from cli.serving.source import as_argument, default_model
from decoding.errors import ConfigError
from deployments.configuration.config import load_config
from deployments.configuration.paths import locate
from deployments.planning.hub import fetch, fetch_all, is_hub_id
from deployments.planning.model_server import resolve
from deployments.planning.plan import GIB
from engine.loading.gguf.files import is_gguf, settings_folder, weights_folder

_console = Console(highlight=False)


def pull_configuration(path: Path) -> None:
    """Download or convert all that a configuration names."""
    config = load_config(path)
    fetch_all(config)
    for model in config.models.values():
        if is_gguf(model.path):
            _convert(model.path, model.dtype, unpacked=model.unpacks)
    _console.print(f"{path}: all that it names is on this machine", markup=False, soft_wrap=True)
    _console.print(f"  consort serve {path}", markup=False, soft_wrap=True)


def pull_model(model: str | None, revision: str | None, dtype: str) -> None:
    """Download or convert a model. model: None for the default. dtype: of the weights of a .gguf file."""
    model = as_argument(model)
    path = resolve(default_model() if model is None else model, "MODEL")
    snapshot = fetch(path, key="MODEL", revision=revision) if is_hub_id(path) else None
    if is_gguf(path):
        text = f"converted to {_convert(path, dtype)}"
    elif snapshot is not None:
        size = sum(file.stat().st_size for file in snapshot.folder.rglob("*") if file.is_file())
        text = f"{size / GIB:.2f} GiB in {snapshot.folder}"
    else:
        text = "nothing to get, it is on this machine"
    _console.print(f"{path}: {text}", markup=False, soft_wrap=True)
    _console.print(f"  consort serve {path if model is not None else ''}", markup=False, soft_wrap=True)


def quantize_model(model: str, kind: Literal["int4", "int8", "nf4"], output: Path) -> None:
    """Write a model with weights of 4 or 8 bits, and its tokenizer, to a new folder."""
    from transformers.utils.logging import disable_progress_bar

    from engine.loading.checkpoint import ModelSpec, load_model, save_rounded
    from engine.loading.settings import load_tokenizer

    disable_progress_bar()
    if output.exists():
        raise ConfigError(f"--output {output}: is there already; name a new folder")
    path = resolve(model, "MODEL")
    if is_hub_id(path):
        fetch(path, key="MODEL", revision=None)
    with reporting(_console) as report:
        report("tokenizer")
        tokenizer = load_tokenizer(locate(path))
        report("weights")
        loaded = load_model(ModelSpec(name="MODEL", path=locate(path), device="cpu", quantization=kind))
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent) as unfinished:
            folder = Path(unfinished) / "model"
            save_rounded(loaded, locate(path), folder)
            tokenizer.save_pretrained(folder)
            folder.rename(output)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    _console.print(f"{model}: {size / GIB:.2f} GiB in {output}", markup=False, soft_wrap=True)
    _console.print(f"  consort serve {output}", markup=False, soft_wrap=True)


def _convert(path: str, dtype: str, *, unpacked: bool = False) -> Path:
    """Convert a file and return the folder with both its settings and weights."""
    from transformers.utils.logging import disable_progress_bar

    from engine.loading.checkpoint import ModelSpec

    disable_progress_bar()
    file = locate(path)
    logging.getLogger(settings_folder.__module__).setLevel(logging.ERROR)  # the progress says it
    try:
        with reporting(_console) as report:
            report("settings and tokenizer")
            settings_folder(file)
            report("weights")
            spec = ModelSpec(name="pulled", path=file, dtype=dtype, unpacked=unpacked)
            return Path(weights_folder(file, dtype, unpacked=not spec.keeps_integers)).parent
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
