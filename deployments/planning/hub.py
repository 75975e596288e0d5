"""Gets models from the Hugging Face Hub into its cache, before replicas look there."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from decoding.errors import ConfigError, ConsortError, UnavailableError
from deployments.configuration.config import ServerConfig
from deployments.configuration.paths import PACKAGE, locate
from engine.loading.gguf.files import hub_file

Files = Literal["settings", "weights", "all"]

_TIMEOUT_S = 5.0
_SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
_WEIGHTS = ["*.safetensors"]
_PICKLED = ["*.bin", "*.pt"]
_STORED = re.compile(r"(?!consolidated)[^/]*\.safetensors")
_TWICE = ["*/*", "consolidated*"]  # the same weights in the formats of other programs


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model of the Hub on this machine."""

    folder: Path  # or its .gguf file
    weights_bytes: int | None  # of its safetensors files, here or not; None: it has none, or the Hub could not be asked


def is_hub_id(path: str) -> bool:
    """Whether a model's path names no file or folder of this machine."""
    return not path.startswith((PACKAGE, ".", "/", "~")) and not Path(locate(path)).exists()


def fetch(
    model: str, *, key: str, revision: str | None = None, files: Files = "weights", safetensors_only: bool = True
) -> Snapshot:
    """Download what is not in the cache yet, with progress bars on standard error. Without network the cache will do.

    model: its id, or `org/name/file.gguf`, which is downloaded whole.
    key: of the configuration, for errors.
    files: "settings": all but the weights; "all": other formats of the weights, too.

    Raises ConfigError for a model that can't be had, UnavailableError if the Hub does not answer and no cache has it.
    """
    if (gguf := hub_file(model)) is not None:
        return _fetch_gguf(*gguf, key=key, revision=revision)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    weights = [] if files == "settings" else _WEIGHTS + ([] if safetensors_only else _PICKLED)
    download = partial(
        snapshot_download,
        model,
        revision=revision,
        allow_patterns=None if files == "all" else _SETTINGS + weights,
        ignore_patterns=None if files == "all" else _TWICE,
    )
    try:
        info = HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_S, files_metadata=True)
    except HFValidationError as error:
        raise ConfigError(
            f"{key}: {model!r} is no folder or .gguf file here, and no id of the Hugging Face Hub"
        ) from error
    except Exception as error:  # also those of the HTTP library, which differs between versions
        try:
            return Snapshot(Path(str(download(local_files_only=True))), None)
        except OSError:
            pass
        raise _refusal(error, model, path=model, key=key, revision=revision) from error
    sizes = [file.size or 0 for file in info.siblings or () if _STORED.fullmatch(file.rfilename)]
    try:
        folder = str(download())
    except Exception as error:
        raise UnavailableError(f"{key}: the download of {model!r} broke off, run it again: {_brief(error)}") from error
    return Snapshot(Path(folder), sum(sizes) or None)


def _fetch_gguf(repository: str, name: str, *, key: str, revision: str | None) -> Snapshot:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if revision is not None:
        raise ConfigError(f"{key}: a .gguf file of the Hub is that of the main branch; remove the revision")
    try:
        return Snapshot(Path(hf_hub_download(repository, name, etag_timeout=_TIMEOUT_S)), None)
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ConfigError(
                f"{key}: the model {repository!r} of the Hugging Face Hub has no file {name!r}"
            ) from error
        raise _refusal(error, repository, path=f"{repository}/{name}", key=key, revision=None) from error


def _refusal(error: Exception, model: str, *, path: str, key: str, revision: str | None) -> ConsortError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        advice = f"accept its conditions at https://huggingface.co/{model}, and set HF_TOKEN"
        return ConfigError(f"{key}: {model!r} is gated: {advice}")
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(f"{key}: the model {model!r} has no revision {revision!r}")
    if isinstance(error, RepositoryNotFoundError):
        return ConfigError(
            f"{key}: there is no {path!r} here, and no model {model!r} on the Hugging Face Hub; for a private model "
            "set HF_TOKEN"
        )
    return UnavailableError(
        f"{key}: there is no {path!r} here, it is not in the cache, and the Hugging Face Hub can't be reached: "
        f"{_brief(error)}"
    )


def fetch_all(config: ServerConfig, *, files: Files = "weights") -> Mapping[str, Snapshot]:
    """Fetch all that a configuration has from the Hub. Returns the models' snapshots by name; raises as `fetch`."""
    snapshots = {}
    for name, model in config.models.items():
        if is_hub_id(model.path):
            snapshots[name] = fetch(
                model.path,
                key=f"models.{name}.path",
                revision=model.revision,
                files=files,
                safetensors_only=model.safetensors_only,
            )
    if files == "settings":
        return snapshots
    for name, model in config.models.items():
        if model.adapter is not None and is_hub_id(model.adapter):
            fetch(model.adapter, key=f"models.{name}.adapter", files="all")
        for adapter, path in model.adapters.items():
            if is_hub_id(path):
                fetch(path, key=f"models.{name}.adapters.{adapter}")
    for name, endpoint in config.endpoints.items():
        heads = endpoint.heads
        if heads is not None and heads.path is not None and is_hub_id(heads.path):
            fetch(heads.path, key=f"endpoints.{name}.heads.path", revision=heads.revision, files="all")
        for adapter, path in () if heads is None else heads.adapters.items():
            if is_hub_id(path):
                fetch(path, key=f"endpoints.{name}.heads.adapters.{adapter}")
    return snapshots


def on_disk(config: ServerConfig, snapshots: Mapping[str, Snapshot]) -> ServerConfig:
    """Return the configuration with the folders of models in place of their ids."""
    local = {
        name: config.models[name].model_copy(update={"path": str(snapshot.folder)})
        for name, snapshot in snapshots.items()
    }
    return config.model_copy(update={"models": config.models | local})


def stay_offline(config: ServerConfig) -> None:
    """Let processes that start later take models from the cache, without asking the Hub for newer files.

    Code of a checkpoint, and adapters that are loaded at run time, may be in repositories that no configuration names.
    """
    if not any(model.trust_remote_code or model.adapters_at_run_time for model in config.models.values()):
        os.environ["HF_HUB_OFFLINE"] = "1"


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
