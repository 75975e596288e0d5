"""Prometheus metrics of the current state: requests, replicas and their load, this process.

Nothing is kept between scrapes, so a replica that is gone leaves no series behind.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.endpoints.service import Service
from deployments.http.server_status import ReplicaLoad, replica_loads
from deployments.monitoring.exposition import with_coordinator
from deployments.monitoring.metrics import ENDPOINT_LABELS, ENGINE
from deployments.scaling.controller import Placement
from engine.model.page_tables import PAGE_SIZE

_REPLICA_LABELS = ("model", "role", "replica")


class LiveMetrics:
    """All metrics that one coordinator has. Call it in the service's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._process = ProcessCollector(registry=None)

    def shared(self) -> list[Metric]:
        """Return what every coordinator says alike: endpoints and replicas."""
        replicas = replica_loads(self._service)
        targets = {load: load.drafting for load in replicas if load.drafting is not None}
        return [
            self._kv_usage(replicas),
            self._cache_config(),
            *self._readiness(),
            _replica_metric("rows", "Requests that hold a slot.", {load: load.running for load in replicas}),
            _replica_metric("waiting", "Requests that wait for a slot.", {load: load.waiting for load in replicas}),
            _replica_metric("slots", "Requests that can run at once.", {load: load.slots for load in replicas}),
            _replica_metric("drafting", "Whether a target wants drafts.", targets),
        ]

    def own(self) -> list[Metric]:
        """Return this coordinator's metrics, with its name as a label, so that those of several add up."""
        text = "Batches of replicas' messages that could not be decoded."
        families = [
            *self._service.metrics.families(),
            *self._requests(),
            *self._adapters(),
            CounterMetricFamily("consort:malformed_batches", text, value=self._service.malformed),
            self._replica_starts(),
            GaugeMetricFamily("consort:event_loop_tasks", "Tasks of the event loop.", value=_count_tasks()),
            *self._process.collect(),
        ]
        return with_coordinator(families, self._service.metrics.coordinator)

    def _requests(self) -> Iterator[Metric]:
        waiting, running = self._service.admission.counts()
        for name, text, counts in (
            ("num_requests_running", "Requests that have begun.", running),
            ("num_requests_waiting", "Requests that wait for their turn.", waiting),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=ENDPOINT_LABELS)
            for endpoint in self._service.endpoints:
                family.add_metric((endpoint, ENGINE), counts[endpoint])
            yield family
        text = "Requests that wait for their turn; none is held back for another reason."
        reasons = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=(*ENDPOINT_LABELS, "reason"))
        for endpoint in self._service.endpoints:
            reasons.add_metric((endpoint, ENGINE, "capacity"), waiting[endpoint])
            reasons.add_metric((endpoint, ENGINE, "deferred"), 0)
        yield reasons

    def _kv_usage(self, replicas: list[ReplicaLoad]) -> Metric:
        text = "Share of the target's KV pages in use, 1 is all."
        family = GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=ENDPOINT_LABELS)
        for name, served in self._service.endpoints.items():
            targets = [replica for replica in replicas if replica.model == served.endpoint.target]
            usage = sum(replica.kv_usage for replica in targets) / max(len(targets), 1)
            family.add_metric((name, ENGINE), usage)
        return family

    def _cache_config(self) -> Metric:
        """Return the size of the target's KV cache in labels: over all of its replicas, once they have reported."""
        pages = Counter[str]()
        for address, report in self._service.replicas():
            pages[address.model] += 0 if report is None else report.pages
        labels = (*ENDPOINT_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching")
        family = GaugeMetricFamily("vllm:cache_config_info", "The target's KV cache.", labels=labels)
        for name, served in self._service.endpoints.items():
            if count := pages[served.endpoint.target]:
                family.add_metric((name, ENGINE, str(PAGE_SIZE), str(count), "True"), 1)
        return family

    def _adapters(self) -> Iterator[Metric]:
        """Yield the adapters with requests, in labels, if there may be adapters. The value is the time."""
        served = self._service.endpoints
        bases = {parent: served[parent].max_adapters for endpoint in served.values() if (parent := endpoint.parent)}
        bases |= {name: endpoint.max_adapters for name, endpoint in served.items() if endpoint.max_adapters}
        if not bases:
            return
        names = [name for name, endpoint in served.items() if endpoint.parent is not None]
        most = sum(count or sum(served[name].parent == base for name in names) for base, count in bases.items())
        waiting, running = (
            ",".join(name for name in names if counts[name]) for counts in self._service.admission.counts()
        )
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters with requests.", labels=labels)
        family.add_metric((str(most), waiting, running), time.time())
        yield family

    def _readiness(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("consort:endpoint_ready", "1 while its models can answer.", labels=("endpoint",))
        text = "1 for the state of the endpoint's models; they never sleep."
        state = GaugeMetricFamily("vllm:engine_sleep_state", text, labels=(*ENDPOINT_LABELS, "sleep_state"))
        up = self._service.servable_models()
        for name, served in self._service.endpoints.items():
            is_ready = float(served.is_ready(up))
            ready.add_metric((name,), is_ready)
            state.add_metric((name, ENGINE, "awake"), is_ready)
            state.add_metric((name, ENGINE, "weights_offloaded"), 0)
            state.add_metric((name, ENGINE, "discard_all"), 0)
        yield from (ready, state)

    def _replica_starts(self) -> Metric:
        text = "Replicas that came up, by model; more than were added: some were replaced."
        family = CounterMetricFamily("consort:replica_starts", text, labels=("model",))
        for model, starts in self._service.replica_starts().items():
            family.add_metric((model,), starts)
        return family


def replica_counts(placements: Mapping[str, Placement]) -> list[Metric]:
    """Return how many replicas each model should have and has, by model."""
    wanted = GaugeMetricFamily("consort:replicas_wanted", "Replicas that a model should have.", labels=("model",))
    running = GaugeMetricFamily("consort:replicas_running", "Replicas of a model that are up.", labels=("model",))
    for model, placement in placements.items():
        wanted.add_metric((model,), placement.wanted)
        running.add_metric((model,), placement.running)
    return [wanted, running]


def _replica_metric(name: str, text: str, values: Mapping[ReplicaLoad, float]) -> Metric:
    family = GaugeMetricFamily(f"consort:replica_{name}", text, labels=_REPLICA_LABELS)
    for replica, value in values.items():
        family.add_metric((replica.model, replica.role, replica.name), float(value))
    return family


def _count_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs in this thread
        return 0
