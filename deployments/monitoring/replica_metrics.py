"""What a replica tells through Ray's own metrics, which Prometheus gets from every node with `ray_` before the names.

Names that vLLM has are vLLM's, with `_` for `:`, as vLLM itself has them under Ray. Serve adds labels that tell the
application, the deployment and the replica.
"""

from dataclasses import asdict, replace
from typing import Any

from ray.serve.metrics import Counter, Gauge

from actors.loops.thread import LoopTimes
from actors.wire.messages import Report

GAUGES = {
    "vllm_num_requests_running": "Requests that hold a slot.",
    "vllm_num_requests_waiting": "Requests that wait for a slot.",
    "vllm_kv_cache_usage_perc": "Share of the KV slots in use, 1 is all.",
    "consort_drafting": "Of a target: 1 while drafts are wanted, 0 while plain decoding is faster.",
    "consort_speculation_gain": "Of a target: speed with speculation over that without, by its trials; 1: unknown.",
}
COUNTERS = {  # by the names of LoopTimes, and one more
    "malformed": ("consort_malformed_batches_total", "Batches of messages that made no sense, and were dropped."),
    "steps": ("consort_steps_total", "Batched steps."),
    "step_s": ("consort_step_seconds_total", "Time in batched steps."),
    "prefill_s": ("consort_prefill_seconds_total", "Time in chunks of prompts."),
    "drafted_s": ("consort_drafting_seconds_total", "Of a target: time in a drafter inside it."),
    "trial_loss_s": (
        "consort_trial_loss_seconds_total",
        "Of a target: time lost by trying whether speculative or plain decoding is faster.",
    ),
    "waited_s": (
        "consort_wait_seconds_total",
        "Time with requests, but without drafts (target) or verdicts (drafter).",
    ),
    "idle_s": ("consort_idle_seconds_total", "Time without requests."),
    "out_of_memory": ("consort_out_of_memory_total", "Forwards that the device had too little memory for."),
}


class ReplicaMetrics:
    """Of one replica."""

    def __init__(self, model: str, role: str) -> None:
        labels = {"model_name": model, "role": role}
        keys: Any = tuple(labels)  # of any length, whatever the annotation there says
        self._gauges = {name: Gauge(name, description=text, tag_keys=keys) for name, text in GAUGES.items()}
        self._counters = {
            field: Counter(name, description=text, tag_keys=keys) for field, (name, text) in COUNTERS.items()
        }
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(dict(labels))  # Serve writes into what it is given
        self._told, self._told_malformed = LoopTimes(), 0

    def tell(self, report: Report, times: LoopTimes, malformed: int) -> None:
        """The load now, and what came to it since the last call. times, malformed: of the loop, since it started."""
        now = replace(times)  # the loop goes on counting
        since = asdict(now - self._told) | {"malformed": malformed - self._told_malformed}
        self._told, self._told_malformed = now, malformed
        for field, amount in since.items():
            if amount > 0:
                self._counters[field].inc(amount)
        values = (
            report.active,
            report.waiting,
            report.active / max(report.slots, 1),
            report.drafting,
            report.speculation_gain,
        )
        for name, value in zip(GAUGES, values, strict=True):
            self._gauges[name].set(float(value))
