"""`consort audit` of a server with tiny models in this process: nothing differs but what a proxy spoils."""

import json
import threading
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from click.testing import CliRunner

from cli import shell
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from evaluation.audit.audit import CHECKS, make_sample
from evaluation.audit.server import connect
from tests.deployments.conftest import engine, with_tools
from tests.evaluation.audit.spoiler import FAULTS, Fault, Spoiler, once_in
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from actors.replica.in_process import Engine

__all__ = ["engine", "with_tools"]

SIZE = {"requests": 2, "max_tokens": 16, "crowd": 2}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]


@pytest.fixture(scope="module")
def tools() -> dict[str, ServedEndpoint]:
    return with_tools.__wrapped__()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def spoiler(engine: "Engine", tools: dict[str, ServedEndpoint]) -> Iterator[tuple[Spoiler, str]]:
    spoiler = Spoiler(make_api(Service(tools, engine.coordinator)))
    server = uvicorn.Server(uvicorn.Config(spoiler, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server listens")
    yield spoiler, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_nothing_differs(spoiler: tuple[Spoiler, str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"audit.{kind}" for kind in ("json", "html")}
    arguments = ["audit", spoiler[1], *OPTIONS, *(f"--{kind}={path}" for kind, path in files.items())]
    result = CliRunner().invoke(shell.main, arguments)
    assert result.exit_code == 0, result.output
    checks = {check["name"]: check["verdict"] for check in json.loads(files["json"].read_text())["checks"]}
    assert {name for name, verdict in checks.items() if verdict != "kept"} == {"the other server"}, result.output
    assert all(name in files["html"].read_text() for name in checks)


def sees(spoiler: tuple[Spoiler, str], fault: Fault, size: dict[str, int]) -> bool:
    """Return whether the check that should see a fault does; it looks once and shrinks nothing."""
    proxy, url = spoiler
    server = connect(url)
    (check,) = (check for check in CHECKS if check.name == fault.check)
    proxy.fault = fault
    try:
        return any(any(check.look(server, probe)) for probe in check.probes(make_sample(server, **size)))
    finally:
        proxy.fault = None


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(spoiler: tuple[Spoiler, str], name: str) -> None:
    assert sees(spoiler, FAULTS[name](), SIZE)


@pytest.mark.slow
def test_a_rare_fault_is_seen(spoiler: tuple[Spoiler, str]) -> None:
    """Half of the command's default sample is greedy: 512 tokens, written twice."""
    rare = Fault("greedy, repeated", answer=once_in(500))
    assert sees(spoiler, rare, {"requests": 16, "max_tokens": 64, "crowd": 1})


def test_what_differs_is_shown_by_the_smallest_requests(spoiler: tuple[Spoiler, str], tmp_path: Path) -> None:
    proxy, url = spoiler
    proxy.fault = FAULTS["another text in company"]()
    page = tmp_path / "audit.html"
    options = ["--requests=6", "--max-tokens=16", "--check=in company", f"--html={page}"]
    try:
        result = CliRunner().invoke(shell.main, ["audit", url, *options])
    finally:
        proxy.fault = None
    assert result.exit_code == 1
    requests = [line for line in result.output.splitlines() if line.startswith("curl")]
    assert len(requests) == 2, result.output  # one, and its neighbour
    assert all('"max_tokens": 1,' in request for request in requests)
    assert escape(requests[0]) in page.read_text()
