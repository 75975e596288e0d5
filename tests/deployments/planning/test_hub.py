"""Models of the Hub, with a Hub that answers, refuses or is out of reach."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from cli import shell
from decoding.errors import ConfigError, ConsortError, UnavailableError
from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from deployments.planning.hub import Snapshot, fetch, fetch_all, is_hub_id, on_disk, stay_offline
from deployments.planning.model_server import ModelServer


class Hub:
    """Stands in for the Hub and its cache."""

    def __init__(self, folder: Path, *, error: Exception | None = None, cached: bool = False) -> None:
        self.folder, self.error, self.cached = folder, error, cached
        self.downloads: list[tuple[str, dict[str, Any]]] = []

    def model_info(self, model: str, *, timeout: float, **options: Any) -> SimpleNamespace:
        assert timeout <= 10
        if self.error is not None:
            raise self.error
        files = {"config.json": 10, "model.safetensors": 700, "original/consolidated.safetensors": 700}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()])

    def snapshot_download(self, model: str, **options: Any) -> str:
        self.downloads.append((model, options))
        if options.get("local_files_only") and not self.cached:
            raise FileNotFoundError("not in the cache")
        return str(self.folder)

    def install(self, patch: pytest.MonkeyPatch) -> "Hub":
        patch.setattr(huggingface_hub, "HfApi", lambda: self)
        patch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        return self


def refusal(kind: type[Exception]) -> Exception:
    """Return an error of the Hub's, whose constructor wants a response that differs between versions."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401 Client Error")
    return error


def test_weights_are_downloaded_once_and_in_one_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path).install(monkeypatch)
    snapshot = fetch("org/model", key="MODEL", revision="v1")
    assert (snapshot.folder, snapshot.weights_bytes) == (tmp_path, 700)
    (_, options) = hub.downloads[0]
    assert options["revision"] == "v1"
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.bin" not in options["allow_patterns"]
    fetch("org/model", key="MODEL", files="settings", safetensors_only=False)
    assert "*.safetensors" not in hub.downloads[1][1]["allow_patterns"]


def test_the_cache_does_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(tmp_path, error=ConnectionError("Name or service not known"), cached=True).install(monkeypatch)
    assert fetch("org/model", key="MODEL").folder == tmp_path


@pytest.mark.parametrize(
    ("error", "kind", "problem"),
    [
        (ConnectionError("no route\nto host"), UnavailableError, r"not in the cache, .* can't be reached: no route$"),
        (
            refusal(RepositoryNotFoundError),
            ConfigError,
            "there is no 'org/model' here, and no model 'org/model' on the",
        ),
        (refusal(GatedRepoError), ConfigError, r"is gated: accept its conditions at https://huggingface\.co/org/model"),
        (refusal(RevisionNotFoundError), ConfigError, "has no revision 'v1'"),
    ],
)
def test_what_can_not_be_had_is_one_line(
    error: Exception, kind: type[ConsortError], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(tmp_path, error=error).install(monkeypatch)
    with pytest.raises(kind, match=problem) as caught:
        fetch("org/model", key="models.m.path", revision="v1")
    assert str(caught.value).startswith("models.m.path: ")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_id_of_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"is no folder or \.gguf file here, and no id of the Hugging Face Hub"):
        fetch("no such/model", key="MODEL")


def test_a_gguf_file_is_downloaded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.Q4_K_M.gguf"
    downloads: list[tuple[str, ...]] = []

    def download(*names: str, etag_timeout: float) -> str:
        downloads.append(names)
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    path = "org/m-GGUF/m.Q4_K_M.gguf"
    config = ModelServer(model=path).config()
    (name,) = config.models
    assert list(config.endpoints) == [name] == ["m.Q4_K_M"]
    snapshots = fetch_all(config)
    assert downloads == [("org/m-GGUF", "m.Q4_K_M.gguf")]
    assert on_disk(config, snapshots).models[name].path == str(file)
    with pytest.raises(ConfigError, match="remove the revision"):
        fetch(path, key="MODEL", revision="v1")


@pytest.mark.parametrize(
    ("error", "kind", "problem"),
    [
        (EntryNotFoundError, ConfigError, r"the model 'org/m' of the Hugging Face Hub has no file 'm\.gguf'"),
        (
            RepositoryNotFoundError,
            ConfigError,
            "there is no 'org/m/m.gguf' here, and no model 'org/m' on the Hugging Face Hub",
        ),
        (LocalEntryNotFoundError, UnavailableError, "the Hugging Face Hub can't be reached"),
    ],
)
def test_a_gguf_file_that_can_not_be_had_is_one_line(
    error: type[Exception], kind: type[ConsortError], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*names: str, etag_timeout: float) -> str:
        raise refusal(error)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(kind, match=problem) as caught:
        fetch("org/m/m.gguf", key="MODEL")
    assert "\n" not in str(caught.value)


def test_all_that_a_configuration_names_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path).install(monkeypatch)
    adapters = {"sql": "org/sql", "poet": "org/poet", "local": str(tmp_path)}
    models = {
        "m": {"path": "org/m", "adapter": "org/adapter"},
        "local": {"path": str(tmp_path)},
        "base": {"path": str(tmp_path), "adapters": adapters},
    }
    heads = {"path": "org/heads", "kind": "medusa"}
    endpoints = {"e": {"target": "m", "drafter": "local", "heads": heads}, "f": {"target": "base"}}
    config = parse_config({"models": models, "endpoints": endpoints}, folder=tmp_path)
    assert set(fetch_all(config)) == {"m"}
    assert [model for model, _ in hub.downloads] == ["org/m", "org/adapter", "org/sql", "org/poet", "org/heads"]
    assert all("*.safetensors" in (options["allow_patterns"] or ["*.safetensors"]) for _, options in hub.downloads)
    local = on_disk(config, {"m": Snapshot(tmp_path, None)})
    assert (local.models["m"].path, config.models["m"].path) == (str(tmp_path), "org/m")
    assert [is_hub_id(path) for path in ("org/m", "models/target", "./x", "package:a/b")] == [True, False, False, False]


def test_pull_fetches_what_a_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path).install(monkeypatch)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"models: {{m: {{path: {ROOT}/models/target, adapters: {{sql: org/sql}}}}}}\nendpoints: {{e: {{target: m}}}}\n",
        encoding="utf-8",
    )
    result = CliRunner().invoke(shell.main, ["pull", str(file)])
    assert result.exit_code == 0, result.output
    assert [model for model, _ in hub.downloads] == ["org/sql"]
    assert CliRunner().invoke(shell.main, ["pull", str(file), "--revision", "main"]).exit_code == 2


@pytest.mark.parametrize(("at_run_time", "offline"), [(0, "1"), (2, None)])
def test_adapters_can_be_had_from_the_hub_at_run_time(
    at_run_time: int, offline: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    models = {"m": {"path": str(tmp_path), "adapters_at_run_time": at_run_time}}
    stay_offline(parse_config({"models": models, "endpoints": {"e": {"target": "m"}}}, folder=tmp_path))
    assert os.environ.get("HF_HUB_OFFLINE") == offline
