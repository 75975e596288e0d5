"""Who may reach a server that listens by itself, and its certificate."""

import subprocess
from pathlib import Path

import pytest

from decoding.errors import ConfigError
from deployments.configuration.api_keys import key_of
from deployments.configuration.config import parse_config
from deployments.configuration.http import HttpConfig

KEY = {"someone": key_of("secret", field="key", admin=False)}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "models.example.org"])
def test_what_others_reach_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^http\.host: other machines can reach .* --insecure$"):
        HttpConfig(host=host).guarded()
    for guarded in (HttpConfig(host=host).guarded(insecure=True), HttpConfig(host=host, api_keys=KEY).guarded()):
        assert guarded.allowed_hosts is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_without_a_key_this_machine_is_asked_by_its_own_names(host: str) -> None:
    own = {"localhost", "127.0.0.1", "[::1]", host if host != "::1" else "[::1]"}
    assert set(HttpConfig(host=host).guarded().host_names or ()) == own
    assert HttpConfig(host=host, api_keys=KEY).guarded().host_names is None
    named = HttpConfig(host=host, allowed_hosts=["mine.example"]).guarded()
    assert set(named.host_names or ()) == {*own, "mine.example"}


def config_with(folder: Path, **tls: str) -> HttpConfig:
    models = {"target": {"path": "models/target"}}
    data = {"models": models, "endpoints": {"e": {"target": "target"}}, "http": {"tls": tls}}
    return parse_config(data, folder=folder).http


def test_a_certificate_is_found_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    http = config_with(tmp_path, certificate="mine.pem", key="mine.key")
    assert http.url == "https://127.0.0.1:8000"
    assert http.tls is not None
    assert http.tls.certificate == str(tmp_path / "mine.pem")
    http.tls.client_context()
    monkeypatch.setenv("CERTIFICATES", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config_with(tmp_path / "elsewhere", certificate="$CERTIFICATES/mine.pem", key="~/mine.key").tls == http.tls
    with pytest.raises(ConfigError, match=r"^http\.tls\.key: '\$NOT_SET/mine\.key': the environment has no NOT_SET"):
        config_with(tmp_path, certificate="mine.pem", key="$NOT_SET/mine.key")
    with pytest.raises(ConfigError, match=r"^http\.tls\.key: there is no file .*missing\.key$"):
        config_with(tmp_path, certificate="mine.pem", key="missing.key")
    with pytest.raises(ConfigError, match=r"^http\.tls: the certificate and the key can't be used together: "):
        config_with(tmp_path, certificate="mine.pem", key="other.key")


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        ("redis://user:secret@host", "should be memory, none, sqlite:///PATH or postgresql://"),
        ("sqlite:///away/responses.db", "should be a file, new or old, in a folder that is there"),
    ],
)
def test_a_store_that_cannot_be_is_refused_without_its_password(store: str, problem: str, tmp_path: Path) -> None:
    data = {"models": {"m": {"path": "a/b"}}, "endpoints": {"e": {"target": "m"}}, "responses": {"store": store}}
    with pytest.raises(ConfigError, match=r"responses\.store: ") as refused:
        parse_config(data, folder=tmp_path)
    assert problem in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_store_in_a_file_is_found_beside_the_configuration(tmp_path: Path) -> None:
    data = {"models": {"m": {"path": "a/b"}}, "endpoints": {"e": {"target": "m"}}}
    for given, path in (("kept.db", tmp_path / "kept.db"), (f"{tmp_path}/other.db", tmp_path / "other.db")):
        config = parse_config({**data, "responses": {"store": f"sqlite:///{given}"}}, folder=tmp_path)
        assert config.responses.store == f"sqlite:///{path}"
