"""Servers for all suites: those that are running (CONSORT_URL, CONSORT_DEFAULT_URL), or our own in other processes.

Must import nothing of Consort: the clients' environment does not have it. CONSORT_PYTHON is the interpreter that has.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_START_S = 240


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The base URL, without /v1, of a server whose model answers by rule."""
    with _server("CONSORT_URL", "tests.clients.server") as url:
        yield url


@pytest.fixture(scope="session")
def default_url() -> Iterator[str]:
    """The base URL, without /v1, of `consort serve` without a configuration."""
    with _server("CONSORT_DEFAULT_URL", "cli", "serve", "--port") as url:
        yield url


@contextmanager
def _server(variable: str, *command: str) -> Iterator[str]:
    """The URL in an environment variable, or of a server that a module starts at the port after its arguments."""
    if given := os.environ.get(variable):
        yield given
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = os.environ.get("CONSORT_PYTHON", sys.executable)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([python, "-m", *command, str(port)], cwd=ROOT, env=environment)
    try:
        _wait(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _wait(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server has ended"
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise TimeoutError(f"no server at {url} after {_START_S} s")


@pytest.fixture(autouse=True)
def _no_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep clients from looking for keys, and from reporting what they do."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
