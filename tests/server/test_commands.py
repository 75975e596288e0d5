"""`consort serve` and `consort demo` in their own processes, as a user runs them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.client import Client
from deployments.configuration.config import TINY_CONFIG
from deployments.configuration.paths import ROOT
from tests.support.commands import running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster

LONG = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
CACHES = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # where the default model is converted, once
COMMAND = [sys.executable, "-m", "cli"]


def ray_processes(group: int) -> list[int]:
    """Live Ray processes that descend from the command, by the mark in their environment."""
    marker = f"CONSORT_TEST={group}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile
    return pids


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment with a mark by which descendants are recognised."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **inherited,
        "CONSORT_TEST": str(os.getpid()),
        "COLUMNS": "120",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": CACHES,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_demo_shows_text_and_statistics_and_leaves_nothing(environment: dict[str, str]) -> None:
    process = subprocess.run(
        [*COMMAND, "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert "sleep" in process.stdout.split("three tips.")[1]
    for shown in (
        "Target-smollm2: ready",
        "draft tokens accepted",
        "as fast",
        "the same seed gives the same text",
        "curl -N",
    ):
        assert shown in process.stdout
    wait_until(lambda: not ray_processes(os.getpid()), "all processes have ended")
    assert not (Path(environment["HOME"]) / ".ray").exists()  # where Ray would leave a token


def test_serve_answers_until_it_is_interrupted(environment: dict[str, str]) -> None:
    port = free_port()
    command = [*COMMAND, "serve", "--port", str(port)]
    with running(command, env=environment) as process:
        assert process.stdout is not None
        assert any("Ctrl-C stops the server" in line for line in process.stdout)
        client = Client(f"http://127.0.0.1:{port}")
        asked = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 5}
        chunks = list(client.stream("/v1/completions", asked))
        assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        whole = "".join(chunk["choices"][0]["text"] for chunk in client.stream("/v1/completions", LONG))
        stream = client.stream("/v1/completions", LONG)
        text = next(stream)["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("Stopping: ")
        wait_until(lambda: client.get("/ready").status == 503, "the server is not ready any more")
        refused = client.post("/v1/completions", asked)
        assert (refused.status, refused.document["error"]["code"]) == (503, "unavailable")
        assert text + "".join(chunk["choices"][0]["text"] for chunk in stream) == whole
        assert process.stdout.read().splitlines() == ["Stopped."]
    assert process.returncode == 0
    wait_until(lambda: not ray_processes(os.getpid()), "all processes have ended")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_while_it_loads_says_so_in_a_line(
    environment: dict[str, str], number: signal.Signals
) -> None:
    command = [*COMMAND, "serve", str(TINY_CONFIG), "--port", str(free_port())]
    with running(command, env=environment, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert any(line.startswith("Ray: ready") for line in process.stdout)
        process.send_signal(number)
        assert process.stdout.read().split() == ["Aborted!"]
    assert process.returncode == 1
    wait_until(lambda: not ray_processes(os.getpid()), "all processes have ended")
