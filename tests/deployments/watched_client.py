"""Starts the watched server, for tests that ask it over HTTP."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from deployments.configuration.paths import ROOT

SECRET = "secret-of-the-tests"
_TRIES, _PAUSE_S = 600, 0.1


@contextmanager
def watched(*, authenticated: bool = False) -> Iterator[httpx.Client]:
    """Run the server until the block ends. Yield a client of it, with the key if one is needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.deployments.watched_server", str(port)]
    process = subprocess.Popen([*command, SECRET] if authenticated else command, cwd=ROOT, env=environment)
    headers = {"Authorization": f"Bearer {SECRET}"} if authenticated else {}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            _wait(client)
            yield client
    finally:
        process.kill()
        process.wait()


def _wait(client: httpx.Client) -> None:
    for _ in range(_TRIES):
        try:
            client.get("/health")
            return
        except httpx.ConnectError:
            time.sleep(_PAUSE_S)
    raise TimeoutError("the server did not start")
