"""A client that takes little of the cores that it shares with servers, and a load of requests in flight."""

import asyncio
import itertools
import json
import random
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evaluation.prompts import read_prompts

_READ_BYTES = 65536
_EVENT = re.compile(rb"^data: (\{.*)$", re.MULTILINE)  # servers send each in one part, so no other line is like it


@dataclass(frozen=True, slots=True)
class Exchange:
    """A response as its client saw it. Times are on the monotonic clock."""

    began_s: float
    ended_s: float
    first_s: float | None  # arrival of the body's first byte
    status: int  # 0: the connection broke before a status arrived
    retry_after: str | None
    body: bytes
    arrivals: Sequence[tuple[int, float]] = ()  # bytes of the body that had arrived, and when

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    @property
    def is_whole(self) -> bool:
        """Whether it is a stream that came to its end."""
        return self.status == HTTPStatus.OK and b"data: [DONE]" in self.body

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield when each event of a stream had arrived, and its content."""
        ends = [end for end, _ in self.arrivals]
        for match in _EVENT.finditer(self.body):
            yield self.arrivals[bisect_left(ends, match.end())][1], json.loads(match[1])


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
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        return Exchange(began_s, time.monotonic(), None, 0, None, b"")
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        first_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        received, arrivals = bytearray(), []
        while piece := await reader.read(_READ_BYTES):
            received += piece
            arrivals.append((len(received), time.monotonic()))
    except (OSError, asyncio.IncompleteReadError):
        return Exchange(began_s, time.monotonic(), None, 0, None, b"")
    finally:
        writer.close()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status, first_s = int(first_line.split()[1]), arrivals[0][1] if arrivals else None
    retry_after = headers.get("retry-after")
    return Exchange(began_s, time.monotonic(), first_s, status, retry_after, bytes(received), arrivals)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one run, and their concurrency."""

    requests: int
    concurrency: int
    new_tokens: int  # of every answer: no answer ends at EOS
    temperature: float
    seed: int  # of the choice and order of prompts


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one run, times in milliseconds.

    `itl` is the time between events: with speculation an event has all tokens of a step. `tpot` is the time per token,
    without the first one.
    """

    concurrency: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_event: float


class LoadGenerator:
    """Keeps requests in flight, each of a prompt that no server knows."""

    def __init__(self, prompts: Path) -> None:
        """prompts: lines of {"prompt": text}."""
        self._prompts = read_prompts(prompts)
        self._run = int(time.time()) % 10**5 * 1000  # servers may know the prompts of other runs

    def run(self, url: str, model: str, load: Load, extra_body: Mapping[str, object]) -> LoadResult:
        """Send the load to the server at `url`. Raises RuntimeError if an answer is missing or too short.

        Each run's prompts begin with its number, so that no server finds them in its cache.
        """
        self._run += 1
        shuffled = random.Random(load.seed).sample(self._prompts, len(self._prompts))
        shared = {"model": model, "max_tokens": load.new_tokens, "temperature": load.temperature, "ignore_eos": True}
        shared |= {"stream": True, "stream_options": {"include_usage": True}, **extra_body}
        bodies = (shared | {"prompt": f"{self._run} {prompt}"} for prompt in itertools.cycle(shuffled))
        exchanges = asyncio.run(_keep_in_flight(url, itertools.islice(bodies, load.requests), load.concurrency))
        return measured(exchanges, load)


async def _keep_in_flight(url: str, bodies: Iterator[Mapping[str, object]], concurrency: int) -> list[Exchange]:
    async def client() -> list[Exchange]:
        return [await complete(url, body) for body in bodies]  # which all clients share

    parts = await asyncio.gather(*(client() for _ in range(concurrency)))
    return [exchange for part in parts for exchange in part]


def measured(exchanges: Sequence[Exchange], load: Load) -> LoadResult:
    """Return the result of a load. Raises RuntimeError as `LoadGenerator.run` does."""
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": []}
    for exchange in exchanges:
        events = list(exchange.events()) if exchange.is_whole else []
        tokens = next((event["usage"]["completion_tokens"] for _, event in reversed(events) if event.get("usage")), 0)
        if tokens != load.new_tokens:
            reason = f"status {exchange.status}, {exchange.body[-500:]!r}"
            raise RuntimeError(f"{tokens} of {load.new_tokens} tokens of an answer came: {reason}")
        texts_s = [time_s for time_s, event in events if event.get("choices") and event["choices"][0]["text"]]
        times["ttft"].append(texts_s[0] - exchange.began_s)
        times["tpot"].append((texts_s[-1] - texts_s[0]) / (tokens - 1))
        times["itl"] += [after - before for before, after in pairwise(texts_s)]
    seconds = max(each.ended_s for each in exchanges) - min(each.began_s for each in exchanges)
    tokens = load.new_tokens * len(exchanges)
    return LoadResult(
        load.concurrency,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(exchanges) / seconds,
        **{f"{name}_p{p}_ms": 1e3 * percentile(values, p) for name, values in times.items() for p in (50, 99)},
        tokens_per_event=tokens / (len(exchanges) + len(times["itl"])),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
