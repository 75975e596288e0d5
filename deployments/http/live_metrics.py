"""What holds at the moment of a scrape, in Prometheus' format: requests at hand, replicas and their load, this process.

Nothing is kept between scrapes, so a replica that has gone leaves no series behind.
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
    """Of one service; a registry of its own, so that several fit into one process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The exposition. To be called in the service's event loop."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the replicas."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All of them, as prometheus_client asks for them."""
        replicas = replica_loads(self._service)
        yield from self._of_endpoints(replicas)
        yield _of_replicas("rows", "Requests that hold a slot.", {one: one.running for one in replicas})
        yield _of_replicas("waiting", "Requests that wait for a slot.", {one: one.waiting for one in replicas})
        yield _of_replicas("slots", "Requests that can run at once.", {one: one.slots for one in replicas})
        targets = {one: one.drafting for one in replicas if one.drafting is not None}
        yield _of_replicas("drafting", "Whether a target wants drafts.", targets)
        text = "Batches of replicas' messages that made no sense."
        yield CounterMetricFamily("consort:malformed_batches", text, value=self._service.malformed)
        yield GaugeMetricFamily("consort:event_loop_tasks", "Tasks of the event loop.", value=_count_tasks())

    def _of_endpoints(self, replicas: list[ReplicaLoad]) -> Iterator[GaugeMetricFamily]:
        waiting, running = self._service.admission.counts()
        families = {
            name: GaugeMetricFamily(f"vllm:{name}", text, labels=ENDPOINT_LABELS)
            for name, text in (
                ("num_requests_running", "Requests that have begun."),
                ("num_requests_waiting", "Requests that wait for their turn."),
                ("kv_cache_usage_perc", "Share of the target's KV slots in use, 1 is all."),
            )
        }
        for name, served in self._service.endpoints.items():
            labels = (name, ENGINE)
            families["num_requests_running"].add_metric(labels, running[name])
            families["num_requests_waiting"].add_metric(labels, waiting[name])
            own = [one for one in replicas if one.model == served.endpoint.target]
            slots = sum(one.slots for one in own)
            use = sum(one.running for one in own) / slots if slots else 0.0
            families["kv_cache_usage_perc"].add_metric(labels, use)
        yield from families.values()


def _of_replicas(name: str, text: str, values: Mapping[ReplicaLoad, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"consort:replica_{name}", text, labels=_REPLICA_LABELS)
    for one, value in values.items():
        family.add_metric((one.model, one.role, one.name), float(value))
    return family


def _count_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs in this thread
        return 0
