"""`consort audit` of a server with tiny models in this process: nothing differs but what a proxy spoils."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from click.testing import CliRunner

from cli import shell
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from evaluation.audit.audit import audit, make_sample
from evaluation.audit.server import connect
from tests.deployments.conftest import engine, with_tools
from tests.evaluation.audit.spoiler import FAULTS, Spoiler
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


@pytest.mark.parametrize("name", [name for name in FAULTS if "500" not in name])
def test_a_fault_is_seen(spoiler: tuple[Spoiler, str], name: str) -> None:
    proxy, url = spoiler
    server = connect(url)
    proxy.fault = FAULTS[name]()
    try:
        (result,) = audit(server, make_sample(server, **SIZE), [proxy.fault.check])
    finally:
        proxy.fault = None
    assert result.verdict == "differs"
