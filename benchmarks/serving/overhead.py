"""Overhead of HTTP: one stream through the server, compared with a coordinator in this process on the same replicas.

The two alternate with the same prompts, so the models' time is the same. The difference is the cost of HTTP, Serve's
proxy, the tokenizer, JSON and events.
"""

import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlsplit

from actors.coordinator.loop import Coordinator
from actors.loops.thread import LoopThread
from actors.replica import in_process
from actors.wire.zmq_link import ConnectingZmqLink
from benchmarks.serving.servers import MODEL, replica_addresses
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.config import ServerConfig
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.loading import load_endpoints

_SWITCH_INTERVAL_S = 0.0005  # as in the server: the coordinator's thread and the client's share the interpreter


@dataclass(frozen=True, slots=True)
class Stream:
    """Times of one answer at its client."""

    first_s: float  # until the first token
    rate: float  # tokens per second after the first

    @classmethod
    def from_times(cls, began_s: float, times_s: Sequence[float], tokens: int) -> "Stream":
        """Compute the times. times_s: arrival of each delta."""
        return cls(times_s[0] - began_s, (tokens - 1) / (times_s[-1] - times_s[0]))


@dataclass(frozen=True, slots=True)
class Overhead:
    """HTTP against direct use, with speculation on or off; medians over the prompts."""

    speculate: bool
    prompts: int
    http_first_ms: float
    direct_first_ms: float
    added_first_ms: float  # median of the differences, prompt by prompt
    http_rate: float
    direct_rate: float
    lost_rate: float  # share of tokens per second: 1 − the median of the ratios, prompt by prompt


def measure_overhead(
    config: ServerConfig, prompts: Sequence[str], *, new_tokens: int, temperature: float, speculate: bool
) -> Overhead:
    """Measure every prompt both ways, in alternating order. The first prompt is a warm-up.

    The two prompts start differently, so that the second way does not profit from the prefix cache.
    """
    served = load_endpoints(config)[MODEL]
    pairs: list[tuple[Stream, Stream]] = []
    with _coordinator(config) as (coordinator, thread), _connection(config) as connection:
        for index, prompt in enumerate(prompts):
            over_http, directly = (
                CompletionRequest(
                    model=MODEL,
                    prompt=[f"{way}{index}\n{prompt}"],
                    max_tokens=new_tokens,
                    temperature=temperature,
                    seed=index,
                    ignore_eos=True,
                    stream=True,
                    speculate=speculate,
                )
                for way in "ab"
            )
            if index % 2:
                direct = _ask_directly(coordinator, thread, served, directly)
                pairs.append((_ask_over_http(connection, over_http), direct))
            else:
                pairs.append(
                    (_ask_over_http(connection, over_http), _ask_directly(coordinator, thread, served, directly))
                )
    return _overhead(pairs[1:], speculate)


def _overhead(pairs: Sequence[tuple[Stream, Stream]], speculate: bool) -> Overhead:
    return Overhead(
        speculate,
        len(pairs),
        http_first_ms=median(over_http.first_s for over_http, _ in pairs) * 1e3,
        direct_first_ms=median(direct.first_s for _, direct in pairs) * 1e3,
        added_first_ms=median(over_http.first_s - direct.first_s for over_http, direct in pairs) * 1e3,
        http_rate=median(over_http.rate for over_http, _ in pairs),
        direct_rate=median(direct.rate for _, direct in pairs),
        lost_rate=1 - median(over_http.rate / direct.rate for over_http, direct in pairs),
    )


@contextmanager
def _coordinator(config: ServerConfig) -> Iterator[tuple[Coordinator, LoopThread]]:
    """Start a second coordinator for the server's replicas."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    link = ConnectingZmqLink("overhead")
    coordinator = Coordinator(link)
    thread = LoopThread("coordinator", coordinator.turn, link.wake)
    thread.start()
    coordinator.set_replicas(replica_addresses(config))
    try:
        yield coordinator, thread
    finally:
        thread.stop()
        link.close()
        sys.setswitchinterval(interval_s)


@contextmanager
def _connection(config: ServerConfig) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(config.http.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    try:
        yield connection
    finally:
        connection.close()


def _ask_directly(
    coordinator: Coordinator, thread: LoopThread, served: ServedEndpoint, body: CompletionRequest
) -> Stream:
    (request,) = served.prepare(body, seed=body.seed_or_new())
    times_s, tokens = [], 0
    began_s = time.perf_counter()
    for delta in in_process.stream(coordinator, request, thread.check):
        times_s.append(time.perf_counter())
        tokens += len(delta.tokens)
    return Stream.from_times(began_s, times_s, tokens)


def _ask_over_http(connection: http.client.HTTPConnection, body: CompletionRequest) -> Stream:
    """Send the request to the server on an open connection."""
    text = body.model_dump_json(exclude_none=True)
    times_s: list[float] = []
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", text.encode(), {"Content-Type": "application/json"})
    with connection.getresponse() as response:
        for line in response:
            if line.startswith(b"data: {"):
                if "choices" not in json.loads(line.removeprefix(b"data: ")):
                    raise RuntimeError(f"the server could not answer: {line.decode()}")
                times_s.append(time.perf_counter())
        if response.status != http.client.OK:
            raise RuntimeError(f"the server refused: HTTP {response.status}")
    assert body.max_tokens is not None
    return Stream.from_times(began_s, times_s, body.max_tokens)
