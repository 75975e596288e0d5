"""Prometheus metrics of the current state: requests, replicas and their load, this process.

Nothing is kept between scrapes, so a replica that is gone leaves no series behind.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.wire.messages import Report
from deployments.configuration.roles import roles_in
from deployments.endpoints.service import Service
from deployments.monitoring.metrics import ENDPOINT_LABELS, ENGINE
from deployments.scaling.placement import Placement
from engine.model.page_allocator import PAGE_SIZE

_PROCESS = ProcessCollector(registry=None)


def own_metrics(service: Service) -> list[Metric]:
    """Return one coordinator's metrics, with its name as a label, so that those of several add up."""
    malformed = "Batches of replicas' messages that could not be decoded."
    text = "Replicas that came up, by model; more than were added: some were replaced."
    starts = CounterMetricFamily("consort:replica_starts", text, labels=("model",))
    for model, count in service.coordinator.replica_starts().items():
        starts.add_metric((model,), count)
    families = [
        *service.metrics.families(),
        *_requests(service),
        *_adapters(service),
        *_kept_responses(service),
        CounterMetricFamily("consort:malformed_batches", malformed, value=service.coordinator.malformed),
        starts,
        GaugeMetricFamily("consort:event_loop_tasks", "Tasks of the event loop.", value=_count_tasks()),
        *_PROCESS.collect(),
    ]
    return with_coordinator(families, service.metrics.coordinator)


def shared_metrics(service: Service, placements: Mapping[str, Placement]) -> list[Metric]:
    """Return what every coordinator says alike: endpoints and replicas. placements: by model."""
    wanted = {model: placement.wanted for model, placement in placements.items()}
    running = {model: placement.running for model, placement in placements.items()}
    return [
        *_kv_caches(service),
        *_readiness(service),
        *_replicas(service),
        _gauge("consort:replicas_wanted", "Replicas that a model should have.", ("model",), wanted),
        _gauge("consort:replicas_running", "Replicas of a model that are up.", ("model",), running),
    ]


def with_coordinator(families: Iterable[Metric], coordinator: str) -> list[Metric]:
    """Return the families with the coordinator's name in a label of every sample."""
    own = {"coordinator": coordinator}
    return [_copy(family, [sample.labels | own for sample in family.samples]) for family in families]


def exposition(parts: Iterable[Sequence[Metric]]) -> bytes:
    """Return all families in Prometheus' text format. Families of the same name become one."""
    return generate_latest(_Merged(parts))


class _Merged(Collector):
    def __init__(self, parts: Iterable[Sequence[Metric]]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for family in (family for part in self._parts for family in part):
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = _copy(family, [sample.labels for sample in family.samples])
        yield from merged.values()


def _copy(family: Metric, labels: Sequence[dict[str, str]]) -> Metric:
    copied = Metric(family.name, family.documentation, family.type, family.unit)
    pairs = zip(family.samples, labels, strict=True)
    copied.samples = [sample._replace(labels=own) for sample, own in pairs]
    return copied


def _requests(service: Service) -> list[Metric]:
    waiting, running = service.admission.counts()
    reasons = {(name, ENGINE, "capacity"): waiting[name] for name in service.endpoints}
    reasons |= {(name, ENGINE, "deferred"): 0 for name in service.endpoints}
    text = "Requests that wait for their turn; none is held back for another reason."
    return [
        _by_endpoint("num_requests_running", "Requests that have begun.", service, running),
        _by_endpoint("num_requests_waiting", "Requests that wait for their turn.", service, waiting),
        _gauge("vllm:num_requests_waiting_by_reason", text, (*ENDPOINT_LABELS, "reason"), reasons),
    ]


def _adapters(service: Service) -> list[Metric]:
    """Return the adapters with requests, in labels, if there may be adapters. The value is the time."""
    served = service.endpoints
    bases = {parent: served[parent].max_adapters for endpoint in served.values() if (parent := endpoint.parent)}
    bases |= {name: endpoint.max_adapters for name, endpoint in served.items() if endpoint.max_adapters}
    if not bases:
        return []
    names = [name for name, endpoint in served.items() if endpoint.parent is not None]
    most = sum(count or sum(served[name].parent == base for name in names) for base, count in bases.items())
    waiting, running = (",".join(name for name in names if counts[name]) for counts in service.admission.counts())
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    values = {(str(most), waiting, running): time.time()}
    return [_gauge("vllm:lora_requests_info", "Adapters with requests.", labels, values)]


def _kept_responses(service: Service) -> list[Metric]:
    """Return what the store holds, as this coordinator last counted it."""
    store = service.conversations.store
    turns, size = (0, 0) if store is None else (store.turns, store.bytes)
    return [
        GaugeMetricFamily("consort:responses_kept", "Answers to /v1/responses that are kept.", value=turns),
        GaugeMetricFamily("consort:responses_kept_bytes", "What they take.", value=size),
    ]


def _kv_caches(service: Service) -> list[Metric]:
    """Return how full the targets' KV caches are, and their sizes over all replicas, once these have reported."""
    pages, usages = Counter[str](), defaultdict[str, list[float]](list)  # by model
    for address, report in service.coordinator.reports():
        pages[address.model] += 0 if report is None else report.pages
        usages[address.model].append(0.0 if report is None else report.used_pages / max(report.pages, 1))
    targets = {name: served.endpoint.target for name, served in service.endpoints.items()}
    usage = {name: mean(usages[target]) if usages[target] else 0.0 for name, target in targets.items()}
    sizes = {
        (name, ENGINE, str(PAGE_SIZE), str(pages[model]), "True"): 1 for name, model in targets.items() if pages[model]
    }
    labels = (*ENDPOINT_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching")
    return [
        _by_endpoint("kv_cache_usage_perc", "Share of the target's KV pages in use, 1 is all.", service, usage),
        _gauge("vllm:cache_config_info", "The target's KV cache.", labels, sizes),
    ]


def _readiness(service: Service) -> list[Metric]:
    up = service.servable_models()
    ready = {name: served.is_ready(up) for name, served in service.endpoints.items()}
    states = {(name, ENGINE, "awake"): float(is_ready) for name, is_ready in ready.items()}
    states |= {(name, ENGINE, "weights_offloaded"): 0.0 for name in ready}
    asleep = service.coordinator.sleeping()
    states |= {
        (name, ENGINE, "discard_all"): float(e.endpoint.target in asleep) for name, e in service.endpoints.items()
    }
    text = "1 for the state of the endpoint's models; those that sleep keep nothing."
    return [
        _gauge("consort:endpoint_ready", "1 while its models can answer.", ("endpoint",), ready),
        _gauge("vllm:engine_sleep_state", text, (*ENDPOINT_LABELS, "sleep_state"), states),
    ]


def _replicas(service: Service) -> list[Metric]:
    roles = roles_in([served.config for served in service.endpoints.values()])
    labels = ("model", "role", "replica")
    rows = GaugeMetricFamily("consort:replica_rows", "Requests that hold a slot.", labels=labels)
    waiting = GaugeMetricFamily("consort:replica_waiting", "Requests that wait for a slot.", labels=labels)
    slots = GaugeMetricFamily("consort:replica_slots", "Requests that can run at once.", labels=labels)
    drafting = GaugeMetricFamily("consort:replica_drafting", "Whether a target wants drafts.", labels=labels)
    for address, report in service.coordinator.reports():
        replica = (address.model, roles[address.model], address.name)
        latest = report or Report(active=0, waiting=0, slots=0, request_ids=[])
        rows.add_metric(replica, latest.active)
        waiting.add_metric(replica, latest.waiting)
        slots.add_metric(replica, latest.slots)
        if report is not None and roles[address.model] != "drafter":
            drafting.add_metric(replica, report.drafting)
    return [rows, waiting, slots, drafting]


def _by_endpoint(name: str, text: str, service: Service, values: Mapping[str, float]) -> Metric:
    labelled = {(endpoint, ENGINE): values[endpoint] for endpoint in service.endpoints}
    return _gauge(f"vllm:{name}", text, ENDPOINT_LABELS, labelled)


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """Return a metric. values: by the labels' values, a tuple; by a name where there is one label."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for own, value in values.items():
        family.add_metric((own,) if isinstance(own, str) else own, float(value))
    return family


def _count_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no event loop runs in this thread
        return 0
