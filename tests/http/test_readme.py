"""The README's commands and examples, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.configuration.config import ROOT, parse_config
from tests.http.conftest import Server

pytestmark = pytest.mark.cluster

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def make_targets() -> set[str]:
    return {line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("make ")}


def test_make_demo() -> None:
    """The installation that runs these tests stands in for the fresh one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    stamp = f"{sys.prefix}/.installed"
    command = ["make", "demo", f"VENV={sys.prefix}", "-o", stamp]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same seed gives the same text" in done.stdout


def test_make_knows_every_target() -> None:
    assert {"demo", "test", "serve"} <= make_targets()
    for target in make_targets():
        command = ["make", "--dry-run", target, f"VENV={sys.prefix}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_curl_streams(server: Server) -> None:
    script = next(block for block in blocks("bash") if block.startswith("curl "))
    command = script.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    events = [line for line in done.stdout.splitlines() if line]
    assert len(events) > 2
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_python_client(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    script = blocks("python")[0].replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    exec(compile(script, "README.md", "exec"), {})
    assert "acceptance_length" in capsys.readouterr().out


def test_configuration_is_valid() -> None:
    config = parse_config(yaml.safe_load(blocks("yaml")[0]), folder=Path.cwd())
    assert config.roles() == {"big": "target", "small": "drafter"}


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
