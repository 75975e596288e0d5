"""One real server for all tests of this folder: Ray, Serve and the bundled models in float32."""

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.exceptions import DeploymentUnavailableError

from cli.serving.cluster import serving
from cli.serving.progress import StartProgress
from deployments.client import Client
from deployments.configuration.config import TINY_CONFIG, load_config
from deployments.replicas.environment import APP_NAME
from deployments.replicas.model_replica import ReplicaStatus


@dataclass(frozen=True)
class Server:
    """The server, for clients and operators."""

    url: str
    port: int
    metrics_port: int
    seen: list[StartProgress]  # what the progress display was told

    @property
    def client(self) -> Client:
        return Client(self.url)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def replicas(self, deployment: str) -> list[ReplicaStatus]:
        """Status of the deployment's live replicas."""
        from ray import serve

        handle = serve.get_deployment_handle(deployment, APP_NAME)
        try:
            answers = handle.broadcast("status").results(timeout_s=10, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [answer for answer in answers if isinstance(answer, ReplicaStatus)]

    def busy(self) -> int:
        """Requests that hold a slot or wait for one, on all models together."""
        reports = [status.report for name in ("Target-target", "Drafter-drafter") for status in self.replicas(name)]
        return sum(report.active + report.waiting for report in reports)


def requests_by_coordinator(url: str) -> Counter[str]:
    """HTTP requests that have ended, by the coordinator that answered."""
    text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer key-free"}, timeout=30).text
    counts = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "consort:requests_total":
                counts[sample.labels["coordinator"]] += int(sample.value)
    return counts


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with socket.socket() as probe, socket.socket() as another:
        for listener in (probe, another):
            listener.bind(("127.0.0.1", 0))
        port, metrics_port = probe.getsockname()[1], another.getsockname()[1]
    config = load_config(TINY_CONFIG)
    config.http.port, config.http.metrics_port = port, metrics_port
    config.models["target"].adapters_at_run_time = 1
    config.models["target"].resources = {"unit": 1}  # the machine has as many as there are replicas at the start
    seen: list[StartProgress] = []
    with serving(config, address=None, watch=seen.extend):
        yield Server(config.http.url, port, metrics_port, seen)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client
