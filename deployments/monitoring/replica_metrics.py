"""A replica's load for Serve's autoscaler, and its metrics through Ray.

Prometheus scrapes every node and prefixes the names with `ray_`; vLLM's have `_` for `:`, as vLLM's under Ray.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ray.serve.metrics import Counter, Gauge

from actors.loops.thread import LoopTimes
from actors.wire.messages import AdaptationState, Report
from deployments.scaling.policy import Felt, ReplicaLoad

_SILENCE_S = 5.0  # after which a coordinator's queue no longer counts; coordinators report every second

GAUGES = {
    "vllm_num_requests_running": "Requests that hold a slot.",
    "vllm_num_requests_waiting": "Requests that wait for a slot or for KV pages.",
    "vllm_kv_cache_usage_perc": "Share of the KV pages in use, 1 is all.",
    "consort_kv_pages": "Pages of the KV cache, of 16 tokens each.",
    "consort_kv_pages_used": "KV pages that requests hold.",
    "consort_kv_pages_shared": "KV pages that more than one request holds.",
    "consort_drafting": "Target: 1 while drafts are wanted, 0 while plain decoding is faster.",
    "consort_speculation_gain": "Target: speed with speculation relative to plain decoding, by its trials; 1: unknown.",
    "consort_corpus_tokens": "Target: tokens of earlier texts that drafts are copied from.",
    "consort_corpus_bytes": "Target: memory for them.",
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
            report.corpus_tokens,
            report.corpus_bytes,
            adaptation.updates,
            adaptation.acceptance_before or 0,
            adaptation.acceptance_after or 0,
        )
        for name, value in zip(GAUGES, values, strict=True):
            self._gauges[name].set(float(value))


class LoadMeter:
    """Measures one replica. Calls may come from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._last, self._clock = LoopTimes(), clock
        self._told: dict[str, tuple[int, Felt, float]] = {}  # by coordinator: requests, how they fared, when it said so

    def note_coordinator(self, coordinator: str, queued: int, felt: Felt = Felt()) -> None:
        """Note how many requests a coordinator holds back for the model, and how others fared, on whichever replica."""
        self._told[coordinator] = queued, felt, self._clock()

    def count_coordinators(self) -> int:
        return len(self._live())

    def measure(self, report: Report, times: LoopTimes) -> ReplicaLoad:
        """Return the load since the last call. times: the loop's, since it started."""
        now = replace(times)  # a copy: the loop goes on counting
        since, self._last = now - self._last, now
        computed_s = since.step_s + since.prefill_s + since.drafted_s
        active_s = computed_s + since.waited_s
        told = self._live()
        speeds = [felt.tokens_per_s for _, felt in told if felt.tokens_per_s]
        return ReplicaLoad(
            rows=report.active,
            waiting=report.waiting,
            slots=report.capacity,
            drafting=float(report.drafting),
            lag=since.waited_s / active_s if active_s else 0.0,
            busy=computed_s / (active_s + since.idle_s) if computed_s else 0.0,
            queued=float(sum(queued for queued, _ in told)),
            ttft_s=max((felt.ttft_s for _, felt in told), default=0.0),
            tokens_per_s=min(speeds, default=0.0),
            drafted=max((felt.drafted for _, felt in told), default=1.0),
        )

    def _live(self) -> list[tuple[int, Felt]]:
        since_s = self._clock() - _SILENCE_S
        self._told = {name: told for name, told in list(self._told.items()) if told[2] >= since_s}
        return [(queued, felt) for queued, felt, _ in self._told.values()]
