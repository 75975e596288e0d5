"""A replica's metrics, exported through Ray: Prometheus scrapes every node and prefixes the names with `ray_`.

Metrics that vLLM has keep its names under Ray, with `_` for `:`. Serve adds labels for the application, the deployment
and the replica.
"""

from dataclasses import asdict, replace
from typing import Any

from ray.serve.metrics import Counter, Gauge

from actors.loops.thread import LoopTimes
from actors.wire.messages import AdaptationState, Report

GAUGES = {
    "vllm_num_requests_running": "Requests that hold a slot.",
    "vllm_num_requests_waiting": "Requests that wait for a slot or for KV pages.",
    "vllm_kv_cache_usage_perc": "Share of the KV pages in use, 1 is all.",
    "consort_kv_pages": "Pages of the KV cache, of 16 tokens each.",
    "consort_kv_pages_used": "KV pages that requests hold.",
    "consort_kv_pages_shared": "KV pages that more than one request holds.",
    "consort_drafting": "Target: 1 while drafts are wanted, 0 while plain decoding is faster.",
    "consort_speculation_gain": "Target: speed with speculation relative to plain decoding, by its trials; 1: unknown.",
    "consort_adaptation_updates": "Drafter: weights that online adaptation published.",
    "consort_adaptation_acceptance_before": "Drafter: acceptance of its files on recent texts that it did not learn.",
    "consort_adaptation_acceptance_after": "Drafter: acceptance of its present weights on the same texts.",
}
COUNTERS = {  # by field of LoopTimes, and `malformed`
    "malformed": ("consort_malformed_batches_total", "Malformed batches of messages, which were dropped."),
    "steps": ("consort_steps_total", "Batched steps."),
    "step_s": ("consort_step_seconds_total", "Time in batched steps."),
    "prefill_s": ("consort_prefill_seconds_total", "Time in prefill chunks."),
    "drafted_s": ("consort_drafting_seconds_total", "Target: time in heads and a colocated drafter."),
    "trial_loss_s": (
        "consort_trial_loss_seconds_total",
        "Target: time lost by trying whether speculative or plain decoding is faster.",
    ),
    "waited_s": (
        "consort_wait_seconds_total",
        "Time waiting for drafts (target) or verdicts (drafter), with requests in progress.",
    ),
    "idle_s": ("consort_idle_seconds_total", "Time without requests."),
    "out_of_memory": ("consort_out_of_memory_total", "Forwards that ran out of device memory."),
    "preemptions": (
        "consort_preemptions_total",
        "Requests that gave back their KV pages and computed their text anew.",
    ),
    "evictions": ("consort_kv_evictions_total", "KV pages of ended texts whose memory was used again."),
}


class ReplicaMetrics:
    """The metrics of one replica."""

    def __init__(self, model: str, role: str) -> None:
        labels = {"model_name": model, "role": role}
        keys: Any = tuple(labels)  # Ray's annotation is wrong: any length works
        self._gauges = {name: Gauge(name, description=text, tag_keys=keys) for name, text in GAUGES.items()}
        self._counters = {
            field: Counter(name, description=text, tag_keys=keys) for field, (name, text) in COUNTERS.items()
        }
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(dict(labels))  # a copy, since Serve changes it
        self._last, self._last_malformed = LoopTimes(), 0

    def export(self, report: Report, times: LoopTimes, malformed: int) -> None:
        """Export the load and what was added since the last call. times, malformed: the loop's, since it started."""
        now = replace(times)  # a copy: the loop goes on counting
        since = asdict(now - self._last) | {"malformed": malformed - self._last_malformed}
        self._last, self._last_malformed = now, malformed
        for field, amount in since.items():
            if amount > 0:
                self._counters[field].inc(amount)
        adaptation = report.adaptation or AdaptationState()
        values = (
            report.active,
            report.waiting,
            report.used_pages / max(report.pages, 1),
            report.pages,
            report.used_pages,
            report.shared_pages,
            report.drafting,
            report.speculation_gain,
            adaptation.updates,
            adaptation.acceptance_before or 0,
            adaptation.acceptance_after or 0,
        )
        for name, value in zip(GAUGES, values, strict=True):
            self._gauges[name].set(float(value))
