"""A real `consort serve` in a child process that ends with the `with` block, and its use of resources."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil  # type: ignore[import-untyped]
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.server_process import ServerProcess
from benchmarks.serving.servers import free_port
from decoding.errors import ConsortError
from deployments.client import Client
from deployments.configuration.config import ServerConfig

_START_S = 120.0
_POLL_S = 0.1
_OURS = "ray::ServeReplica:"  # start of the titles of Ray's replica processes
_PROXY = "ray::ProxyActor"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that the server holds at one moment."""

    running: int  # requests
    waiting: int
    slots: dict[str, int]  # in use or waited for, by replica
    tasks: int  # of the coordinator's event loop
    open_files: int  # of the coordinator
    resident_mib: dict[str, float]  # by process

    @property
    def idle(self) -> bool:
        """Whether nothing is in progress anywhere."""
        return self.running == self.waiting == 0 and not any(self.slots.values())


class ServeProcess(ServerProcess):
    """A `consort serve` process. `with` waits until it is ready."""

    def __init__(self, config: ServerConfig, *, folder: Path) -> None:
        """folder: for the configuration file and the log."""
        config.http.port = free_port()
        self.url = config.http.url
        self.client = Client(self.url)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "http-server.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
        super().__init__(
            [sys.executable, "-m", "cli", "serve", str(file)],
            ready=self._has_all,
            start_s=_START_S,
            log=folder / "http-server.log",
        )

    def footprint(self) -> Footprint:
        """Return the resources in use. Reports of replicas are up to a second old."""
        status, metrics = self.client.document("/v1/status"), self._metrics()
        return Footprint(
            running=status["requests"]["running"],
            waiting=status["requests"]["waiting"],
            slots={replica["name"]: replica["running"] + replica["waiting"] for replica in status["replicas"]},
            tasks=int(metrics["consort:event_loop_tasks"]),
            open_files=int(metrics["process_open_fds"]),
            resident_mib=self._resident_mib(),
        )

    def wait_until_idle(self, timeout_s: float) -> float | None:
        """Wait until the server is idle. Returns the seconds; None after the timeout."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            if self.footprint().idle:
                return time.monotonic() - began_s
            time.sleep(_POLL_S)
        return None

    def _has_all(self) -> bool:
        try:
            status = self.client.get("/v1/status").document
        except ConsortError:
            return False
        return bool(status.get("status") == "ready" and len(status["replicas"]) > 1)

    def read_metrics(self) -> str:
        """Return the text of /metrics."""
        with urlopen(f"{self.url}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text

    def _metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.read_metrics())
        return {sample.name: sample.value for family in families for sample in family.samples}

    def _resident_mib(self) -> dict[str, float]:
        resident_mib: dict[str, float] = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            name = _title(process)
            if name.startswith((_OURS, _PROXY)):
                resident_mib[name.removeprefix(_OURS)] = round(process.memory_info().rss / 2**20, 1)
        return resident_mib


def _title(process: psutil.Process) -> str:
    try:
        words: Sequence[str] = process.cmdline()
    except psutil.Error:
        return ""
    return words[0] if words else ""
