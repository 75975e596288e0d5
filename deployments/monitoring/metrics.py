"""What the server counts and times, for Prometheus, by names that vLLM's dashboards know. One event loop uses it."""

import time
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
ENDPOINT_LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's label for one of several engines behind a server

Metric = TypeVar("Metric", Counter, Histogram)


@dataclass(slots=True)
class _Progress:
    """How far a request has come."""

    endpoint: str
    arrived_s: float
    waits: bool = True
    last_s: float | None = None
    told: Statistics = field(default_factory=Statistics)


class Metrics:
    """Of one coordinator: a registry of its own, so that several fit into one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests: dict[int, _Progress] = {}
        self._parts: dict[tuple[object, ...], Any] = {}
        self._begun: Tally[str] = Tally()  # requests, by endpoint
        self._fared: dict[str, Statistics] = {}  # of those that have ended

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*ENDPOINT_LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, ENDPOINT_LABELS, buckets=buckets, registry=registry)

        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._answer_tokens = counter("generation_tokens", "Tokens of answers.")
        self._ended = counter("request_success", "Requests that ended by themselves.", "finished_reason")
        labels = ("endpoint", "reason")
        self._refused = Counter(
            "consort:requests_refused", "Requests that were answered with 429, by the bound.", labels, registry=registry
        )
        self._failed = Counter("consort:requests_failed", "Requests that got no answer.", labels, registry=registry)
        self._drafts = counter("spec_decode_num_drafts", "Target steps with a draft.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were accepted, by their place.", "position"
        )
        self._missed = counter("spec_decode_num_rejections", "Target steps that rejected a draft token.")
        self._hits = counter("spec_decode_num_hits", "Of these, after how many another draft was there already.")
        self._queue_time = histogram("request_queue_time_seconds", "From arrival to beginning, or to giving up.")
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._between_tokens = histogram("inter_token_latency_seconds", "Between tokens of one answer.")
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._prompt_lengths = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_lengths = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def requests(self, endpoint: str) -> int:
        """How many requests to an endpoint have begun."""
        return self._begun[endpoint]

    def statistics(self, endpoint: str) -> Statistics:
        """How speculation went for all requests to an endpoint, so far as they are."""
        running = (progress.told for progress in self._requests.values() if progress.endpoint == endpoint)
        return sum(running, self._fared.get(endpoint, Statistics()))

    def arrived(self, request: Request, arrived_s: float | None = None) -> None:
        """A request is there. arrived_s: since when, by the monotonic clock; None: now."""
        since_s = time.monotonic() if arrived_s is None else arrived_s
        self._requests[request.request_id] = _Progress(request.endpoint.name, since_s)

    def began(self, request: Request) -> None:
        """A request that had arrived begins."""
        self._waited(request, self._requests[request.request_id])
        self._begun[request.endpoint.name] += 1
        self._of(self._prompt_tokens, request).inc(len(request.prompt))
        self._of(self._prompt_lengths, request).observe(len(request.prompt))

    def delta(self, request: Request, delta: Delta) -> None:
        """A request's next delta is there."""
        progress = self._requests.get(request.request_id)
        if delta.error is not None:
            self.ended(request, delta.error)
        elif progress is not None:
            self._time_tokens(request, progress, len(delta.tokens))
            self._count_drafts(request, progress.told, delta.statistics)
            progress.told = delta.statistics
            if delta.finish is not None:
                self._finish(request, progress, delta.finish)

    def ended(self, request: Request, error: ConsortError | None) -> None:
        """A request ends without an answer; one that has ended already is ignored. error: None: its client hung up."""
        progress = self._requests.get(request.request_id)
        if progress is None:
            return
        self._forget(request)
        if isinstance(error, OverloadedError):
            self.refused(progress.endpoint, error)
            return
        if progress.waits:
            self._waited(request, progress)
        self._failed.labels(progress.endpoint, _reason(error)).inc()

    def refused(self, endpoint: str, error: OverloadedError) -> None:
        """A request was not taken on. endpoint: empty if it was not even read, and so is not known."""
        self._refused.labels(endpoint, error.bound).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def _of(self, metric: Metric, request: Request, *labels: str) -> Metric:
        """The request's part of a metric: a look-up that prometheus_client itself does in several µs."""
        key = (metric, request.endpoint.name, *labels)
        if key not in self._parts:
            self._parts[key] = metric.labels(request.endpoint.name, ENGINE, *labels)
        part: Metric = self._parts[key]
        return part

    def _time_tokens(self, request: Request, progress: _Progress, count: int) -> None:
        if count == 0:
            return
        now_s = time.monotonic()
        self._of(self._answer_tokens, request).inc(count)
        if progress.last_s is None:
            self._of(self._first_token, request).observe(now_s - progress.arrived_s)
        else:
            self._of(self._between_tokens, request).observe((now_s - progress.last_s) / count)
        progress.last_s = now_s

    def _count_drafts(self, request: Request, before: Statistics, now: Statistics) -> None:
        """What one target step did."""
        drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
        if drafted == 0:
            return
        self._of(self._drafts, request).inc()
        self._of(self._drafted, request).inc(drafted)
        self._of(self._accepted, request).inc(accepted)
        for position in range(accepted):
            self._of(self._accepted_at, request, str(position)).inc()
        self._of(self._missed, request).inc(now.missed - before.missed)
        self._of(self._hits, request).inc(now.hits - before.hits)

    def _finish(self, request: Request, progress: _Progress, reason: str) -> None:
        self._forget(request)
        self._of(self._ended, request, reason).inc()
        self._of(self._whole, request).observe(time.monotonic() - progress.arrived_s)
        self._of(self._answer_lengths, request).observe(progress.told.committed)

    def _waited(self, request: Request, progress: _Progress) -> None:
        progress.waits = False
        self._of(self._queue_time, request).observe(time.monotonic() - progress.arrived_s)

    def _forget(self, request: Request) -> None:
        """A request no longer runs; what it did stays in its endpoint's statistics."""
        progress = self._requests.pop(request.request_id)
        self._fared[progress.endpoint] = self._fared.get(progress.endpoint, Statistics()) + progress.told


def _reason(error: ConsortError | None) -> str:
    match error:
        case None:
            return "aborted"
        case DeadlineError():
            return "timeout"
        case UnavailableError():
            return "unavailable"
        case InvalidRequestError():
            return "invalid_request"
        case _:
            return "internal_error"
