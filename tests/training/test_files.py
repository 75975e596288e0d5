"""Files and folders are whole or not there, whatever happens while they are written."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoding.errors import ConfigError
from training.files import remove, whole_folder, write_whole


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_text("1")
        assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_text("1")
    with pytest.raises(FileExistsError), whole_folder(tmp_path / "model") as unfinished:
        unfinished.mkdir()
    assert (tmp_path / "model" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_rest_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".model.unfinished").mkdir()
    (tmp_path / ".model.unfinished" / "half").touch()
    (tmp_path / ".model.removed").mkdir()
    with whole_folder(tmp_path / "model"):
        pass
    assert list((tmp_path / "model").iterdir()) == []
    remove(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.files.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match="the disk is full"), whole_folder(tmp_path / "model"):
        raise RuntimeError("short write")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_does_not_fit_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("training.files.os.fsync", fail)
    with pytest.raises(ConfigError, match="the disk is full"):
        write_whole(tmp_path / "shard", b"text")
    assert list(tmp_path.iterdir()) == []
