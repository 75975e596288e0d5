"""Prometheus metrics of the current state: requests, replicas and their load, this process.

Nothing is kept between scrapes, so a replica that is gone leaves no series behind.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.endpoints.service import Service
from deployments.http.server_status import ReplicaLoad, replica_loads
from deployments.monitoring.metrics import ENDPOINT_LABELS, ENGINE

_REPLICA_LABELS = ("model", "role", "replica")


class LiveMetrics(Collector):
    """Collector for one service, with its own registry, so that a process may have several."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Metrics in Prometheus' text format. Call it in the service's event loop."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Empty, because the series depend on the replicas."""
        return ()

    def collect(self) -> Iterator[Metric]:
        replicas = replica_loads(self._service)
        yield from self._endpoint_metrics(replicas)
        yield _replica_metric("rows", "Requests that hold a slot.", {load: load.running for load in replicas})
        yield _replica_metric("waiting", "Requests that wait for a slot.", {load: load.waiting for load in replicas})
        yield _replica_metric("slots", "Requests that can run at once.", {load: load.slots for load in replicas})
        targets = {load: load.drafting for load in replicas if load.drafting is not None}
        yield _replica_metric("drafting", "Whether a target wants drafts.", targets)
        text = "Batches of replicas' messages that made no sense."
        yield CounterMetricFamily("consort:malformed_batches", text, value=self._service.malformed)
        yield GaugeMetricFamily("consort:event_loop_tasks", "Tasks of the event loop.", value=_count_tasks())

    def _endpoint_metrics(self, replicas: list[ReplicaLoad]) -> Iterator[GaugeMetricFamily]:
        waiting, running = self._service.admission.counts()
        families = {
            name: GaugeMetricFamily(f"vllm:{name}", text, labels=ENDPOINT_LABELS)
            for name, text in (
                ("num_requests_running", "Requests that have begun."),
                ("num_requests_waiting", "Requests that wait for their turn."),
                ("kv_cache_usage_perc", "Share of the target's KV pages in use, 1 is all."),
            )
        }
        for name, served in self._service.endpoints.items():
            labels = (name, ENGINE)
            families["num_requests_running"].add_metric(labels, running[name])
            families["num_requests_waiting"].add_metric(labels, waiting[name])
            targets = [replica for replica in replicas if replica.model == served.endpoint.target]
            usage = sum(replica.kv_usage for replica in targets) / max(len(targets), 1)
            families["kv_cache_usage_perc"].add_metric(labels, usage)
        yield from families.values()


def _replica_metric(name: str, text: str, values: Mapping[ReplicaLoad, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"consort:replica_{name}", text, labels=_REPLICA_LABELS)
    for replica, value in values.items():
        family.add_metric((replica.model, replica.role, replica.name), float(value))
    return family


def _count_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs in this thread
        return 0
