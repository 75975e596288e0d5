"""The command line, without starting anything."""

from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cli import shell
from cli.serving import server
from cli.serving.progress import ProgressDisplay, StartProgress
from cli.serving.source import configured_table
from decoding.errors import ConfigError
from deployments.client import Client, Reply
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.configuration.paths import ROOT, parameter_count


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(shell.main, arguments)


@pytest.fixture(autouse=True)
def _wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    for module in (shell, server):
        monkeypatch.setattr(module, "_console", Console(highlight=False))


def test_version_and_help() -> None:
    assert invoke("--version").output.startswith("consort, version ")
    for command in ([], ["serve"], ["demo"], ["models"], ["bench"]):
        assert "Usage: " in invoke(*command, "--help").output


def test_models_are_listed_without_starting_anything() -> None:
    assert "smollm2" in invoke("models").output
    output = invoke("models", str(TINY_CONFIG)).output
    assert "consort" in output
    assert "models/target" in output
    assert "1024" in output


def test_characters_that_the_terminal_lacks_are_replaced() -> None:
    result = CliRunner(charset="latin-1").invoke(shell.main, ["models"])
    assert result.exit_code == 0
    assert " ? " in result.output  # a dash


def test_models_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"id": "e", "target": "t", "drafter": None, "draft_length": 4, "context_length": 77, "ready": True}
    monkeypatch.setattr(Client, "get", lambda self, path: Reply(200, {"data": [card]}))
    output = invoke("models", "--url", "http://127.0.0.1:1").output
    assert "77" in output
    assert "yes" in output
    monkeypatch.setattr(Client, "get", lambda self, path: Reply(404, {}))
    assert "http://127.0.0.1:1/v1/models: HTTP 404" in invoke("models", "--url", "http://127.0.0.1:1").output


def test_models_takes_a_key_from_the_command_line_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def request(self: httpx.Client, method: str, url: str, **_: object) -> httpx.Response:
        seen.append(self.headers["Authorization"])
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr(httpx.Client, "request", request)
    invoke("models", "--url", "http://127.0.0.1:1", "--api-key", "a")
    monkeypatch.setenv("CONSORT_API_KEY", "b")
    invoke("models", "--url", "http://127.0.0.1:1")
    assert seen == ["Bearer a", "Bearer b"]


def test_a_dry_run_counts_gpus_and_cpus(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    model = f"{{path: {ROOT}/models/target, num_cpus: 100000}}"
    file.write_text(f"models: {{m: {model}}}\nendpoints: {{e: {{target: m}}}}\n", encoding="utf-8")
    assert (
        "num_cpus of all replicas is 100000 together, but this machine has"
        in invoke("serve", str(file), "--dry-run").output
    )


def test_a_dry_run_checks_and_stops() -> None:
    result = invoke("serve", "--dry-run")
    assert result.exit_code == 0
    assert "can be served" in result.output


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: {m: {path: x, slotz: 1}}\nendpoints: {e: {target: m}}\n", encoding="utf-8")
    for command in ("serve", "models"):
        result = invoke(command, str(file))
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert "models.m.slotz: is not known; did you mean 'slots'?" in result.output
        assert len(result.output.splitlines()) == 1


def test_host_and_port_override_the_file() -> None:
    config = server._with_http(load_config(TINY_CONFIG), host="0.0.0.0", port=9)
    assert (config.http.host, config.http.port) == ("0.0.0.0", 9)
    assert load_config(TINY_CONFIG).http.port == 8000


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    assert parameter_count(tmp_path) == 0
    (target,) = configured_table(load_config(TINY_CONFIG)).columns[1].cells
    assert str(target).startswith("target (")
    assert f"{parameter_count(ROOT / 'models' / 'target') / 1e6:.1f} M" in str(target)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        parameter_count(tmp_path)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(terminal: bool) -> None:
    console = Console(force_terminal=terminal, record=True, width=80)
    with ProgressDisplay(console) as display:
        display.watch([StartProgress("Ray", "loading")])
        display.watch([StartProgress("Target-t", "importing torch"), StartProgress("Drafter-d", "waiting")])
        display.watch([StartProgress("Target-t", "reading the weights"), StartProgress("Drafter-d", "waiting")])
        display.watch([StartProgress("Target-t", "ready"), StartProgress("Drafter-d", "ready")])
    text = console.export_text()
    for name in ("Ray", "Target-t", "Drafter-d"):
        assert name in text
        assert text.count("ready") >= 3
    if not terminal:
        lines = [line.split(" after ")[0] for line in text.splitlines()]
        assert lines == [
            *("Ray: ready", "Target-t: importing torch", "Target-t: reading the weights"),
            *("Target-t: ready", "Drafter-d: ready"),
        ]
