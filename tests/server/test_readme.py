"""Runs the README's commands and examples, with the server that the README starts: `consort serve`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.configuration.config import parse_config
from deployments.configuration.paths import ROOT
from tests.support.commands import running

pytestmark = pytest.mark.cluster

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Return the port of `consort serve` with the default configuration, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "cli", "serve", "--port", str(port)]
    with running(command, env=environment, stop=signal.SIGINT) as process:
        assert process.stdout is not None
        assert any("Ctrl-C stops the server" in line for line in process.stdout)
        yield port


def make_targets() -> set[str]:
    return {line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("make ")}


def test_make_knows_every_target() -> None:
    """`make demo` itself is tested in tests/server/test_commands.py."""
    assert {"demo", "serve"} <= make_targets()
    for target in make_targets():
        command = ["make", "--dry-run", target, f"VENV={sys.prefix}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_curl_streams_english(port: int) -> None:
    script = next(block for block in blocks("bash") if block.startswith("curl "))
    command = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=True)
    events = [line for line in done.stdout.splitlines() if line]
    assert len(events) > 2
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    words = set(re.findall(r"[a-z]+", text.lower()))
    assert {"the", "sky", "blue", "is"} <= words, text


@pytest.mark.slow
def test_python_client(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    script = blocks("python")[0].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    exec(compile(script, "README.md", "exec"), {})
    assert "acceptance_length" in capsys.readouterr().out


def console_commands() -> list[str]:
    lines = [line.partition(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line.removeprefix("consort ") for line in lines if re.match("consort (?!serve)", line)]


@pytest.mark.slow
@pytest.mark.parametrize("command", console_commands())
def test_commands_on_the_terminal(port: int, command: str) -> None:
    """Run with the checkout's modules and without a terminal."""
    script = f"{sys.executable} -m cli {command}"
    environment = {**os.environ, "CONSORT_URL": f"http://127.0.0.1:{port}"}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "input": "hi\n", "timeout": 200}
    done = subprocess.run(["bash", "-c", script], **options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_commands_for_the_terminal() -> None:
    assert {command.split()[0] for command in console_commands()} == {"chat", "complete", "status", "bench"}


def test_configuration_is_valid() -> None:
    config = parse_config(yaml.safe_load(blocks("yaml")[0]), folder=Path.cwd())
    assert config.roles() == {"big": "target", "small": "drafter"}


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
