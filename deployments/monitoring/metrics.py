"""The server's Prometheus metrics, by the names of vLLM's dashboards. For use in one event loop."""

import time
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric as Family

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, OverloadedError
from deployments.monitoring.outcome import Outcome

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
ENDPOINT_LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's label for one of several engines behind a server

Metric = TypeVar("Metric", Counter, Histogram)


@dataclass(slots=True)
class _Choices:
    """The answers to one prompt of a client's request."""

    count: int = 0
    unfinished: int = 0  # requests to models
    longest: int = 0  # tokens


@dataclass(slots=True)
class _RequestState:
    """What is known of a request in progress."""

    endpoint: str
    arrived_s: float
    choices: _Choices
    started_s: float | None = None  # when it left the queue
    first_s: float | None = None  # time of the first token
    last_s: float | None = None  # time of the last token
    statistics: Statistics = field(default_factory=Statistics)


class Metrics:
    """The metrics of one coordinator. It has its own registry, so that several fit into one process."""

    def __init__(self, coordinator: str = "coordinator", *, context_length: int = _TOKENS[-1]) -> None:
        """
        coordinator: label that tells its series from those of other coordinators.
        context_length: the endpoints' longest, in tokens.
        """
        self.coordinator = coordinator
        self._registry = registry = CollectorRegistry()
        self._requests: dict[int, _RequestState] = {}
        self._labelled: dict[tuple[object, ...], Any] = {}
        self._started: Tally[str] = Tally()  # requests, by endpoint
        self._prompts: Tally[str] = Tally()  # tokens of prompts that were computed or cached, by endpoint
        self.cache_queries = self.cache_hits = 0  # of the cache of answers
        self._finished: dict[str, Statistics] = {}  # of ended requests, by endpoint

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def endpoint_counter(name: str, text: str, *labels: str) -> Counter:
            return counter(name, text, *ENDPOINT_LABELS, *labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, ENDPOINT_LABELS, buckets=buckets, registry=registry)

        self._prompt_tokens = endpoint_counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._prefix_queries = endpoint_counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked up in KV pages."
        )
        self._prefix_hits = endpoint_counter("vllm:prefix_cache_hits", "Tokens of prompts whose KV pages were there.")
        self._answer_tokens = endpoint_counter("vllm:generation_tokens", "Tokens of answers.")
        self._ended = endpoint_counter("vllm:request_success", "Requests that finished.", "finished_reason")
        self._requests_ended = counter("consort:requests", "HTTP requests that ended.", "endpoint", "key")
        self._refused = counter(
            "consort:requests_refused", "HTTP requests refused with 429, by the limit.", "endpoint", "key", "reason"
        )
        self._failed = counter(
            "consort:requests_failed", "HTTP requests without an answer.", "endpoint", "key", "reason"
        )
        self._answer_queries = counter(
            "consort:answer_cache_queries", "Requests that were looked up in the cache of answers.", "endpoint"
        )
        self._answer_hits = counter("consort:answer_cache_hits", "Requests whose answer was there.", "endpoint")

        self._drafts = endpoint_counter("vllm:spec_decode_num_drafts", "Target steps with a draft.")
        self._drafted = endpoint_counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = endpoint_counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._accepted_at = endpoint_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were accepted, by position.", "position"
        )
        self._drafted_by = endpoint_counter(
            "consort:spec_decode_num_draft_tokens_per_proposer",
            "Draft tokens that were verified, by who offered them first.",
            "proposer",
        )
        self._accepted_by = endpoint_counter(
            "consort:spec_decode_num_accepted_tokens_per_proposer",
            "Draft tokens that were accepted, by who offered them first.",
            "proposer",
        )
        self._missed = endpoint_counter(
            "consort:spec_decode_num_rejections", "Target steps that rejected a draft token."
        )
        self._hits = endpoint_counter("consort:spec_decode_num_hits", "Rejections after which another draft was ready.")

        self._queue_time = histogram("vllm:request_queue_time_seconds", "From arrival to start or failure.")
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._between_tokens = histogram("vllm:inter_token_latency_seconds", "Between tokens of one answer.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._inference = histogram("vllm:request_inference_time_seconds", "From start to the last token.")
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From start to the first token.")
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between the tokens of one answer."
        )
        self._prompt_lengths = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_lengths = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)

        lengths = _lengths(context_length)
        self._preemptions = endpoint_counter("vllm:num_preemptions", "Times that others needed a request's KV pages.")
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a target's step.", _STEP_TOKENS)
        self._longest = histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest choice.", lengths)
        self._counts = histogram("vllm:request_params_n", "Choices of a prompt.", _CHOICES)
        self._limits = histogram("vllm:request_params_max_tokens", "`max_tokens` of a request.", lengths)
        self._computed = histogram("vllm:request_prefill_kv_computed_tokens", "Computed tokens of a prompt.", lengths)
        self._cached = endpoint_counter("vllm:prompt_tokens_cached", "Tokens of prompts that were not computed.")
        self._sources = endpoint_counter("vllm:prompt_tokens_by_source", "Tokens of prompts.", "source")
        self._cached_in = endpoint_counter("vllm:prompt_tokens_cached_by_source", "Cached tokens of prompts.", "source")

    def requests(self, endpoint: str) -> int:
        """Count the requests to an endpoint that have started."""
        return self._started[endpoint]

    def prompt_tokens(self, endpoint: str) -> int:
        """Count the tokens of prompts after which the first token has come."""
        return self._prompts[endpoint]

    def statistics(self, endpoint: str) -> Statistics:
        """Return the statistics of all requests to an endpoint, those in progress included."""
        running = (state.statistics for state in self._requests.values() if state.endpoint == endpoint)
        return sum(running, self._finished.get(endpoint, Statistics()))

    def record_arrival(self, requests: Sequence[Request], arrived_s: float | None = None) -> None:
        """Note that a client's requests have arrived. arrived_s: when, by the monotonic clock; None: now."""
        since_s = time.monotonic() if arrived_s is None else arrived_s
        by_prompt: dict[int, _Choices] = {}  # choices share the list
        for request in requests:
            choices = by_prompt.setdefault(id(request.prompt), _Choices())
            choices.count += 1 if request.beams is None else request.beams.num_return_sequences
            choices.unfinished += 1
            self._requests[request.request_id] = _RequestState(request.endpoint.name, since_s, choices)

    def record_start(self, request: Request) -> None:
        """Note that a request has left the queue."""
        state = self._requests[request.request_id]
        self._observe_wait(request, state)
        state.started_s = time.monotonic()
        self._started[request.endpoint.name] += 1
        self._labels_of(self._prompt_tokens, request).inc(len(request.prompt))
        self._labels_of(self._prompt_lengths, request).observe(len(request.prompt))
        self._labels_of(self._preemptions, request).inc(0)  # alerts see only what rises

    def record_step(self, endpoint: str, tokens: int) -> None:
        """Count the tokens of a target's step, prompts that it read included. Any thread may call this."""
        self._step_tokens.labels(endpoint, ENGINE).observe(tokens)

    def record_delta(self, request: Request, delta: Delta) -> None:
        """Count a request's next delta."""
        state = self._requests.get(request.request_id)
        if delta.error is not None:
            self.record_failure(request, delta.error)
        elif state is not None:
            if state.last_s is None and delta.tokens:
                self._count_prompt(request, delta.statistics.cached)
            self._time_tokens(request, state, len(delta.tokens))
            self._count_drafts(request, state.statistics, delta.statistics)
            if delta.statistics.preemptions > state.statistics.preemptions:
                preemptions = delta.statistics.preemptions - state.statistics.preemptions
                self._labels_of(self._preemptions, request).inc(preemptions)
            state.statistics = delta.statistics
            if delta.finish is not None:
                self._finish(request, state, delta.finish)
                self._finish_choice(request, state, [delta, *delta.others])

    def record_cache(self, request: Request, *, hit: bool) -> None:
        """Count a look-up in the cache of answers."""
        self.cache_queries += 1
        self.cache_hits += hit
        self._answer_queries.labels(request.endpoint.name).inc()
        self._answer_hits.labels(request.endpoint.name).inc(hit)

    def record_failure(self, request: Request, error: ConsortError | None) -> None:
        """Note that a request failed; ignored if it has ended before. error: None if its client hung up."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._forget(request)
        if state.started_s is None and not isinstance(error, OverloadedError):
            self._observe_wait(request, state)

    def record_outcome(self, endpoint: str, key: str, outcome: Outcome, requests: int = 1) -> None:
        """Count HTTP requests that have ended.

        Args:
            endpoint: empty if it is not known, because the body was not read.
            key: name of the API key; empty without a valid one.
        """
        self._requests_ended.labels(endpoint, key).inc(requests)
        if outcome.reason is not None:
            (self._refused if outcome.refused else self._failed).labels(endpoint, key, outcome.reason).inc(requests)

    def families(self) -> Sequence[Family]:
        """Return all metrics."""
        return list(self._registry.collect())

    def _labels_of(self, metric: Metric, request: Request, *labels: str) -> Metric:
        """Return a metric with the request's labels. Cached, because `labels` takes several µs."""
        key = (metric, request.endpoint.name, *labels)
        if key not in self._labelled:
            self._labelled[key] = metric.labels(request.endpoint.name, ENGINE, *labels)
        labelled: Metric = self._labelled[key]
        return labelled

    def _count_prompt(self, request: Request, cached: int) -> None:
        self._prompts[request.endpoint.name] += len(request.prompt)
        self._labels_of(self._prefix_queries, request).inc(len(request.prompt))
        self._labels_of(self._prefix_hits, request).inc(cached)
        self._labels_of(self._computed, request).observe(len(request.prompt) - cached)
        self._labels_of(self._cached, request).inc(cached)
        self._labels_of(self._sources, request, "local_compute").inc(len(request.prompt) - cached)
        self._labels_of(self._sources, request, "local_cache_hit").inc(cached)
        self._labels_of(self._cached_in, request, "device").inc(cached)

    def _time_tokens(self, request: Request, state: _RequestState, count: int) -> None:
        if count == 0:
            return
        now_s = time.monotonic()
        self._labels_of(self._answer_tokens, request).inc(count)
        if state.last_s is None:
            state.first_s = now_s
            self._labels_of(self._first_token, request).observe(now_s - state.arrived_s)
        else:
            self._labels_of(self._between_tokens, request).observe((now_s - state.last_s) / count)
        state.last_s = now_s

    def _count_drafts(self, request: Request, before: Statistics, now: Statistics) -> None:
        """Count the drafts of one target step."""
        drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
        if drafted == 0:
            return
        self._labels_of(self._drafts, request).inc()
        self._labels_of(self._drafted, request).inc(drafted)
        self._labels_of(self._accepted, request).inc(accepted)
        for metric, counts, earlier in (
            (self._drafted_by, now.drafted_by, before.drafted_by),
            (self._accepted_by, now.accepted_by, before.accepted_by),
        ):
            for proposer, count in counts.items():
                self._labels_of(metric, request, proposer).inc(count - earlier.get(proposer, 0))
        for position in range(accepted):
            self._labels_of(self._accepted_at, request, str(position)).inc()
        self._labels_of(self._missed, request).inc(now.missed - before.missed)
        self._labels_of(self._hits, request).inc(now.hits - before.hits)

    def _finish(self, request: Request, state: _RequestState, reason: str) -> None:
        self._forget(request)
        self._labels_of(self._ended, request, reason).inc()
        now_s, tokens = time.monotonic(), state.statistics.committed
        self._labels_of(self._whole, request).observe(now_s - state.arrived_s)
        self._labels_of(self._answer_lengths, request).observe(tokens)
        if state.started_s is None or state.first_s is None:
            return
        self._labels_of(self._inference, request).observe(now_s - state.started_s)
        self._labels_of(self._prefill, request).observe(state.first_s - state.started_s)
        self._labels_of(self._decode, request).observe(now_s - state.first_s)
        if tokens > 1:
            self._labels_of(self._per_token, request).observe((now_s - state.first_s) / (tokens - 1))

    def _finish_choice(self, request: Request, state: _RequestState, last: Sequence[Delta]) -> None:
        """Note the end of a request, and of its prompt's choices with the last one. last: deltas of its answers."""
        choices = state.choices
        choices.unfinished -= 1
        choices.longest = max(choices.longest, *(delta.statistics.committed for delta in last))
        self._labels_of(self._limits, request).observe(request.params.max_tokens)
        if not choices.unfinished:
            self._labels_of(self._counts, request).observe(choices.count)
            self._labels_of(self._longest, request).observe(choices.longest)

    def _observe_wait(self, request: Request, state: _RequestState) -> None:
        self._labels_of(self._queue_time, request).observe(time.monotonic() - state.arrived_s)

    def _forget(self, request: Request) -> None:
        """Remove a request. Its statistics are added to its endpoint's."""
        state = self._requests.pop(request.request_id)
        self._finished[state.endpoint] = self._finished.get(state.endpoint, Statistics()) + state.statistics


def _lengths(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10 and so on up to `most`, as vLLM's buckets of lengths."""
    return tuple(size for power in range(len(str(most))) for digit in (1, 2, 5) if (size := digit * 10**power) <= most)
