"""`consort pull`: gets models ready for serving, with progress. Serves nothing."""

import logging
from pathlib import Path

import click
from rich.console import Console

from actors.loading.gguf import is_gguf, settings_folder, weights_folder
from decoding.errors import ConfigError
from deployments.configuration.config import load_config
from deployments.configuration.model import locate
from deployments.planning.hub import fetch, fetch_all, is_hub_id
from deployments.planning.model_server import resolve
from deployments.ui.commands.bench import reporting
from deployments.ui.serving.options import DTYPES
from deployments.ui.serving.source import default_model

_GIB = 2**30
_console = Console(highlight=False)


@click.command(short_help="Get models ready: from the Hub, or from a .gguf file.")
@click.argument("model", required=False, type=click.Path())
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="auto", help="Of the weights of a .gguf file.")
def pull(model: str | None, revision: str | None, dtype: str) -> None:
    """Download MODEL, an id on the Hugging Face Hub, into its cache; or convert it, a .gguf file. Default: SmolLM2.

    A .gguf file of the Hub, org/name/file.gguf, is downloaded and converted.

    MODEL may also be a configuration that ends in .yaml: then all that it names is downloaded or converted.
    """
    if model is not None and model.lower().endswith((".yaml", ".yml")):
        if revision is not None or dtype != "auto":
            raise click.UsageError("--revision and --dtype are for a MODEL; in a configuration, set the keys")
        config = load_config(Path(model))
        fetch_all(config)
        for each in config.models.values():
            if is_gguf(each.path):
                _convert(each.path, each.dtype)
        _console.print(f"{model}: all that it names is on this machine", markup=False, soft_wrap=True)
        _console.print(f"  consort serve {model}", markup=False, soft_wrap=True)
        return
    path = resolve(default_model() if model is None else model, "MODEL")
    snapshot = fetch(path, key="MODEL", revision=revision) if is_hub_id(path) else None
    if is_gguf(path):
        folder = _convert(path, DTYPES[dtype])
        _console.print(f"{path}: converted to {folder}", markup=False, soft_wrap=True)
    elif snapshot is not None:
        size = sum(file.stat().st_size for file in snapshot.folder.rglob("*") if file.is_file())
        _console.print(f"{path}: {size / _GIB:.2f} GiB in {snapshot.folder}", markup=False, soft_wrap=True)
    else:
        _console.print(f"{path} is on this machine: nothing to get", markup=False, soft_wrap=True)
    _console.print(f"  consort serve {path if model is not None else ''}", markup=False, soft_wrap=True)


def _convert(path: str, dtype: str) -> Path:
    """Convert a file and return the folder with both its settings and weights."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    file = locate(path)
    logging.getLogger(settings_folder.__module__).setLevel(logging.ERROR)  # the progress says it
    try:
        with reporting(_console) as report:
            report("settings and tokenizer")
            settings_folder(file)
            report("weights")
            return Path(weights_folder(file, dtype)).parent
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
