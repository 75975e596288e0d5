"""One HTTP request on a connection of its own, and what clients saw of many beside what `/metrics` say of them."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from statistics import mean
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Exchange:
    """A response as its client saw it. Times are on the monotonic clock."""

    began_s: float
    ended_s: float
    first_s: float | None  # arrival of the body's first byte
    status: int  # 0: the connection broke before a status arrived
    retry_after: str | None
    body: bytes

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    @property
    def is_whole(self) -> bool:
        """Whether it is a stream that came to its end."""
        return self.status == HTTPStatus.OK and b"data: [DONE]" in self.body


async def complete(url: str, body: Mapping[str, object]) -> Exchange:
    """Ask for a completion on a new connection, as an HTTP client's pool would not, and read it to its end."""
    address, began_s = urlsplit(url), time.monotonic()
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        first_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pieces, first_s = [], None
        while piece := await reader.read(_READ_BYTES):
            first_s = first_s or time.monotonic()
            pieces.append(piece)
    except (OSError, asyncio.IncompleteReadError):
        return Exchange(began_s, time.monotonic(), None, 0, None, b"")
    finally:
        writer.close()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first_line.split()[1])
    return Exchange(began_s, time.monotonic(), first_s, status, headers.get("retry-after"), b"".join(pieces))


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity, as clients saw it and as the metrics have it."""

    seen: float
    told: float

    @property
    def error(self) -> float:
        """Difference as a share of what was seen."""
        return abs(self.told - self.seen) / self.seen if self.seen else float(self.told != 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Counts of requests, and means over the answered ones in seconds."""

    requests: Pair
    refused: Pair
    answered: Pair
    queue_s: Pair  # seen: time to the first token, without the server's own time for the prompt
    first_token_s: Pair
    whole_s: Pair

    def pairs(self) -> dict[str, Pair]:
        """Return all of them, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def sum_metrics(text: str) -> defaultdict[str, float]:
    """Return the sum of each metric over its labels. text: of /metrics."""
    sums = defaultdict[str, float](float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


class MetricsMeter:
    """Compares all requests since it was made, of which none may be in progress then."""

    def __init__(self, read_metrics: Callable[[], str]) -> None:
        """read_metrics: returns the text of /metrics."""
        self._read = read_metrics
        self._before = sum_metrics(read_metrics())

    def compare(self, exchanges: Sequence[Exchange]) -> Agreement:
        """Return the agreement with what clients saw. All their requests must have ended; each had one choice."""
        sums = sum_metrics(self._read())
        now = defaultdict(float, {name: value - self._before[name] for name, value in sums.items()})
        answered = [exchange for exchange in exchanges if exchange.is_whole]
        refused = sum(exchange.status == HTTPStatus.TOO_MANY_REQUESTS for exchange in exchanges)
        first_s = _mean([exchange.first_s - exchange.began_s for exchange in answered if exchange.first_s is not None])

        def told_s(name: str) -> float:
            return now[f"vllm:{name}_seconds_sum"] / max(1.0, now[f"vllm:{name}_seconds_count"])

        return Agreement(
            requests=Pair(len(exchanges), now["consort:requests_total"]),
            refused=Pair(refused, now["consort:requests_refused_total"]),
            answered=Pair(len(answered), now["vllm:request_success_total"]),
            queue_s=Pair(first_s - told_s("request_prefill_time"), told_s("request_queue_time")),
            first_token_s=Pair(first_s, told_s("time_to_first_token")),
            whole_s=Pair(_mean([exchange.seconds for exchange in answered]), told_s("e2e_request_latency")),
        )


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else 0.0
