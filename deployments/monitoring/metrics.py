"""The server's Prometheus metrics, by the names of vLLM's dashboards. For use in one event loop."""

import math
import time
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric as Family

from actors.coordinator.request import Delta, Request, Statistics
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from deployments.scaling.policy import Felt

ENDPOINT_LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's label for one of several engines behind a server
_LONGEST = 65536  # tokens of a context, where none is given

_COUNTERS = {  # of an endpoint: what they count, and labels beside `ENDPOINT_LABELS`
    "vllm:prompt_tokens": ("Tokens of prompts.",),
    "vllm:prefix_cache_queries": ("Tokens of prompts that were looked up in KV pages.",),
    "vllm:prefix_cache_hits": ("Tokens of prompts whose KV pages were there.",),
    "vllm:generation_tokens": ("Tokens of answers.",),
    "vllm:request_success": ("Requests that finished.", "finished_reason"),
    "vllm:spec_decode_num_drafts": ("Target steps with a draft.",),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens that were verified.",),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.",),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("Draft tokens that were accepted, by position.", "position"),
    "consort:spec_decode_num_draft_tokens_per_proposer": (
        "Draft tokens that were verified, by who offered them first.",
        "proposer",
    ),
    "consort:spec_decode_num_accepted_tokens_per_proposer": (
        "Draft tokens that were accepted, by who offered them first.",
        "proposer",
    ),
    "consort:spec_decode_num_rejections": ("Target steps that rejected a draft token.",),
    "consort:spec_decode_num_hits": ("Rejections after which another draft was ready.",),
    "vllm:num_preemptions": ("Times that others needed a request's KV pages.",),
    "vllm:prompt_tokens_cached": ("Tokens of prompts that were not computed.",),
    "vllm:prompt_tokens_by_source": ("Tokens of prompts.", "source"),
    "vllm:prompt_tokens_cached_by_source": ("Cached tokens of prompts.", "source"),
}
_HTTP_COUNTERS = {  # what they count, and all labels
    "consort:requests": ("HTTP requests that ended.", "endpoint", "key"),
    "consort:requests_refused": ("HTTP requests refused with 429, by the limit.", "endpoint", "key", "reason"),
    "consort:requests_failed": ("HTTP requests without an answer.", "endpoint", "key", "reason"),
    "consort:answer_cache_queries": ("Requests that were looked up in the cache of answers.", "endpoint"),
    "consort:answer_cache_hits": ("Requests whose answer was there.", "endpoint"),
    "consort:responses_lost": ("Answers to /v1/responses that their store did not take.",),
}
_TIMES = {
    "vllm:request_queue_time_seconds": "From arrival to start or failure.",
    "vllm:time_to_first_token_seconds": "From arrival to the first token.",
    "vllm:inter_token_latency_seconds": "Between tokens of one answer.",
    "vllm:e2e_request_latency_seconds": "From arrival to the last token.",
    "vllm:request_inference_time_seconds": "From start to the last token.",
    "vllm:request_prefill_time_seconds": "From start to the first token.",
    "vllm:request_decode_time_seconds": "From the first token to the last.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the tokens of one answer.",
}
_SIZES = {
    "vllm:request_prompt_tokens": "Tokens of a prompt.",
    "vllm:request_generation_tokens": "Tokens of an answer.",
    "vllm:iteration_tokens_total": "Tokens of a target's step.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest choice.",
    "vllm:request_params_n": "Choices of a prompt.",
    "vllm:request_params_max_tokens": "`max_tokens` of a request.",
    "vllm:request_prefill_kv_computed_tokens": "Computed tokens of a prompt.",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_BUCKETS: dict[str, tuple[float, ...]] = {  # of sizes; the others' are those of vLLM, up to the context's length
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vllm:iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "vllm:request_params_n": (1, 2, 5, 10, 20),
}

_WINDOW_S = 30.0  # that is recent
_MOST = 1000  # recent requests that are looked at
_LEAST = 5  # recent requests, before anything is known
_SLOW = 0.9  # share of requests that fared at least as well as what is reported


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `reason`: None if it was answered."""

    reason: str | None = None
    refused: bool = False  # for want of room, with 429

    @staticmethod
    def from_error(error: Exception) -> "Outcome":
        match error:
            case OverloadedError():
                return Outcome(error.bound, refused=True)
            case DeadlineError():
                return Outcome("timeout")
            case UnavailableError():
                return Outcome("unavailable")
            case InvalidRequestError():
                return Outcome("invalid_request")
            case _:
                return Outcome("internal_error")


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

    def __init__(self, coordinator: str = "coordinator", *, context_length: int = _LONGEST) -> None:
        """
        coordinator: label that tells its series from those of other coordinators.
        context_length: the endpoints' longest, in tokens.
        """
        self.coordinator = coordinator
        self._registry = registry = CollectorRegistry()
        self._states: dict[int, _RequestState] = {}  # by id
        self.requests: Tally[str] = Tally()  # that have started, by endpoint
        self.prompt_tokens: Tally[str] = Tally()  # of prompts that were computed or cached, by endpoint
        self.cache_queries = self.cache_hits = 0  # of the cache of answers
        self._finished: dict[str, Statistics] = {}  # of ended requests, by endpoint
        self._metrics: dict[str, Any] = {
            name: Counter(name, text, (*ENDPOINT_LABELS, *labels), registry=registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._metrics |= {
            name: Counter(name, text, labels, registry=registry) for name, (text, *labels) in _HTTP_COUNTERS.items()
        }
        buckets = dict.fromkeys(_TIMES, _SECONDS) | dict.fromkeys(_SIZES, _lengths(context_length)) | _BUCKETS
        self._metrics |= {
            name: Histogram(name, text, ENDPOINT_LABELS, buckets=buckets[name], registry=registry)
            for name, text in (_TIMES | _SIZES).items()
        }
        self._labelled: dict[tuple[str, ...], Any] = {}
        self._recent: defaultdict[str, RecentSpeeds] = defaultdict(RecentSpeeds)  # by target

    def felt(self, target: str) -> Felt:
        """Return how a target's requests fared lately."""
        return self._recent[target].felt()

    def statistics(self, endpoint: str) -> Statistics:
        """Return the statistics of all requests to an endpoint, those in progress included."""
        running = (state.statistics for state in self._states.values() if state.endpoint == endpoint)
        return sum(running, self._finished.get(endpoint, Statistics()))

    def families(self) -> Sequence[Family]:
        return list(self._registry.collect())

    def record_arrival(self, requests: Sequence[Request], arrived_s: float | None = None) -> None:
        """Note that a client's requests have arrived. arrived_s: when, by the monotonic clock; None: now."""
        since_s = time.monotonic() if arrived_s is None else arrived_s
        by_prompt: dict[int, _Choices] = {}  # choices share the list
        for request in requests:
            choices = by_prompt.setdefault(id(request.prompt), _Choices())
            choices.count += 1 if request.beams is None else request.beams.num_return_sequences
            choices.unfinished += 1
            self._states[request.request_id] = _RequestState(request.endpoint.name, since_s, choices)

    def record_start(self, request: Request) -> None:
        state = self._states[request.request_id]
        state.started_s = time.monotonic()
        self.requests[request.endpoint.name] += 1
        self._observe("vllm:request_queue_time_seconds", request, state.started_s - state.arrived_s)
        self._count("vllm:prompt_tokens", request, len(request.prompt))
        self._observe("vllm:request_prompt_tokens", request, len(request.prompt))
        self._count("vllm:num_preemptions", request, 0)  # alerts see only what rises

    def record_lost_response(self) -> None:
        self._metrics["consort:responses_lost"].inc()

    def record_step(self, endpoint: str, tokens: int) -> None:
        """Count the tokens of a target's step, prompts that it read included. Any thread may call this."""
        self._metrics["vllm:iteration_tokens_total"].labels(endpoint, ENGINE).observe(tokens)

    def record_delta(self, request: Request, delta: Delta) -> None:
        state = self._states.get(request.request_id)
        if delta.error is not None:
            self.record_failure(request, delta.error)
        elif state is not None and delta.restarts:
            state.statistics = delta.statistics
        elif state is not None:
            if state.last_s is None and delta.tokens:
                self._count_prompt(request, delta.statistics.cached)
            self._time_tokens(request, state, len(delta.tokens))
            self._count_drafts(request, state.statistics, delta.statistics)
            preemptions = delta.statistics.preemptions - state.statistics.preemptions
            self._count("vllm:num_preemptions", request, max(preemptions, 0))
            state.statistics = delta.statistics
            if delta.finish is not None:
                self._finish(request, state, delta.finish)
                self._finish_choice(request, state.choices, [delta, *delta.others])

    def record_cache(self, request: Request, *, hit: bool) -> None:
        self.cache_queries += 1
        self.cache_hits += hit
        self._metrics["consort:answer_cache_queries"].labels(request.endpoint.name).inc()
        self._metrics["consort:answer_cache_hits"].labels(request.endpoint.name).inc(hit)

    def record_failure(self, request: Request, error: ConsortError | None) -> None:
        """Note that a request failed; ignored if it has ended before. error: None if its client hung up."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        self._forget(request)
        if state.started_s is None and not isinstance(error, OverloadedError):
            self._observe("vllm:request_queue_time_seconds", request, time.monotonic() - state.arrived_s)

    def record_outcome(self, endpoint: str, key: str, outcome: Outcome, requests: int = 1) -> None:
        """Count HTTP requests that have ended.

        endpoint: empty if it is not known, because the body was not read.
        key: name of the API key; empty without a valid one.
        """
        self._metrics["consort:requests"].labels(endpoint, key).inc(requests)
        if outcome.reason is not None:
            name = "consort:requests_refused" if outcome.refused else "consort:requests_failed"
            self._metrics[name].labels(endpoint, key, outcome.reason).inc(requests)

    def _count(self, name: str, request: Request, amount: int = 1, *labels: str) -> None:
        self._of(name, request, *labels).inc(amount)

    def _observe(self, name: str, request: Request, value: float) -> None:
        self._of(name, request).observe(value)

    def _of(self, name: str, request: Request, *labels: str) -> Any:
        """Return a metric with the request's labels. Cached, because `labels` takes several µs."""
        key = (name, request.endpoint.name, *labels)
        if key not in self._labelled:
            self._labelled[key] = self._metrics[name].labels(request.endpoint.name, ENGINE, *labels)
        return self._labelled[key]

    def _count_prompt(self, request: Request, cached: int) -> None:
        tokens = len(request.prompt)
        self.prompt_tokens[request.endpoint.name] += tokens
        self._count("vllm:prefix_cache_queries", request, tokens)
        self._count("vllm:prefix_cache_hits", request, cached)
        self._observe("vllm:request_prefill_kv_computed_tokens", request, tokens - cached)
        self._count("vllm:prompt_tokens_cached", request, cached)
        self._count("vllm:prompt_tokens_by_source", request, tokens - cached, "local_compute")
        self._count("vllm:prompt_tokens_by_source", request, cached, "local_cache_hit")
        self._count("vllm:prompt_tokens_cached_by_source", request, cached, "device")

    def _time_tokens(self, request: Request, state: _RequestState, count: int) -> None:
        if count == 0:
            return
        now_s = time.monotonic()
        self._count("vllm:generation_tokens", request, count)
        if state.last_s is None:
            state.first_s = now_s
            self._observe("vllm:time_to_first_token_seconds", request, now_s - state.arrived_s)
            self._recent[request.endpoint.target].note_first(now_s - state.arrived_s)
        else:
            self._observe("vllm:inter_token_latency_seconds", request, (now_s - state.last_s) / count)
        state.last_s = now_s

    def _count_drafts(self, request: Request, before: Statistics, now: Statistics) -> None:
        drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
        if drafted == 0:
            return
        self._count("vllm:spec_decode_num_drafts", request)
        self._count("vllm:spec_decode_num_draft_tokens", request, drafted)
        self._count("vllm:spec_decode_num_accepted_tokens", request, accepted)
        for proposer, count in now.drafted_by.items():
            new = count - before.drafted_by.get(proposer, 0)
            self._count("consort:spec_decode_num_draft_tokens_per_proposer", request, new, proposer)
        for proposer, count in now.accepted_by.items():
            new = count - before.accepted_by.get(proposer, 0)
            self._count("consort:spec_decode_num_accepted_tokens_per_proposer", request, new, proposer)
        for position in range(accepted):
            self._count("vllm:spec_decode_num_accepted_tokens_per_pos", request, 1, str(position))
        self._count("consort:spec_decode_num_rejections", request, now.missed - before.missed)
        self._count("consort:spec_decode_num_hits", request, now.hits - before.hits)

    def _finish(self, request: Request, state: _RequestState, reason: str) -> None:
        self._forget(request)
        self._count("vllm:request_success", request, 1, reason)
        now_s, tokens = time.monotonic(), state.statistics.committed
        self._observe("vllm:e2e_request_latency_seconds", request, now_s - state.arrived_s)
        self._observe("vllm:request_generation_tokens", request, tokens)
        if state.started_s is None or state.first_s is None:
            return
        self._observe("vllm:request_inference_time_seconds", request, now_s - state.started_s)
        self._observe("vllm:request_prefill_time_seconds", request, state.first_s - state.started_s)
        self._observe("vllm:request_decode_time_seconds", request, now_s - state.first_s)
        if tokens > 1:
            per_token_s = (now_s - state.first_s) / (tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", request, per_token_s)
            drafted = state.statistics.accepted_by.get("drafter", 0)
            speed = 1 / per_token_s if per_token_s else math.inf
            self._recent[request.endpoint.target].note_answer(speed, tokens, drafted)

    def _finish_choice(self, request: Request, choices: _Choices, last: Sequence[Delta]) -> None:
        """Note the end of a request, and of its prompt's choices with the last one. last: deltas of its answers."""
        choices.unfinished -= 1
        choices.longest = max(choices.longest, *(delta.statistics.committed for delta in last))
        self._observe("vllm:request_params_max_tokens", request, request.params.max_tokens)
        if not choices.unfinished:
            self._observe("vllm:request_params_n", request, choices.count)
            self._observe("vllm:request_max_num_generation_tokens", request, choices.longest)

    def _forget(self, request: Request) -> None:
        state = self._states.pop(request.request_id)
        self._finished[state.endpoint] = self._finished.get(state.endpoint, Statistics()) + state.statistics


def _lengths(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10 and so on up to `most`, as vLLM's buckets of lengths."""
    return tuple(size for power in range(len(str(most))) for digit in (1, 2, 5) if (size := digit * 10**power) <= most)


class _Answer(NamedTuple):
    ended_s: float
    tokens_per_s: float
    tokens: int
    drafted: int  # of them, by drafters in replicas of their own


class RecentSpeeds:
    """How a target's requests fared in the last half minute, for scaling by what users feel."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._firsts: deque[tuple[float, float]] = deque(maxlen=_MOST)  # when, and after how many seconds
        self._answers: deque[_Answer] = deque(maxlen=_MOST)

    def note_first(self, ttft_s: float) -> None:
        self._firsts.append((self._clock(), ttft_s))

    def note_answer(self, tokens_per_s: float, tokens: int, drafted: int) -> None:
        self._answers.append(_Answer(self._clock(), tokens_per_s, tokens, drafted))

    def felt(self) -> Felt:
        since_s = self._clock() - _WINDOW_S
        firsts = sorted(seconds for at_s, seconds in self._firsts if at_s >= since_s)
        answers = [answer for answer in self._answers if answer.ended_s >= since_s]
        speeds = sorted((answer.tokens_per_s for answer in answers), reverse=True)
        tokens = sum(answer.tokens for answer in answers)
        return Felt(
            ttft_s=_slow(firsts),
            tokens_per_s=_slow(speeds),
            drafted=sum(answer.drafted for answer in answers) / tokens if len(answers) >= _LEAST else 1.0,
        )


def _slow(values: list[float]) -> float:
    """Return the value of the slow tenth, of values from good to bad; 0 if there are too few."""
    return values[min(int(_SLOW * len(values)), len(values) - 1)] if len(values) >= _LEAST else 0.0
