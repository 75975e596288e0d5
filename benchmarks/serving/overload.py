"""Latencies of admitted requests under overload, and at the server's capacity."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.agreement import Agreement, MetricsMeter
from benchmarks.serving.http_exchange import Exchange, ask
from training.heldout import read_prompts

_REFUSED = 429
_SETTLE_S = 1.0  # until the metrics have what the proxy refused


@dataclass(frozen=True, slots=True)
class Latencies:
    """Rates and latencies of answered requests, in seconds from connecting to the last byte."""

    answered: int
    per_s: float
    p50_s: float
    p99_s: float
    first_p99_s: float  # to the first byte of the answer


@dataclass(frozen=True, slots=True)
class Overload:
    """Result of a load beyond the capacity."""

    offered_per_s: float
    offered: int
    refused: int
    without_retry_after: int  # refused without a Retry-After header
    failed: int  # neither answered nor refused
    refusal_p50_s: float
    refusal_p99_s: float
    admitted: Latencies
    agreement: Agreement  # with the server's metrics


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The common fields of all requests."""

    url: str
    model: str
    prompts: Path
    new_tokens: int

    def body(self, index: int, texts: Sequence[str]) -> dict[str, object]:
        """Return the body of a streamed completion of fixed length."""
        return {
            "model": self.model,
            "prompt": texts[index % len(texts)],
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": index,
        }


def measure_capacity(template: RequestTemplate, *, at_once: int, seconds: float) -> Latencies:
    """Run a closed loop of `at_once` clients, each with exchange request at a time."""
    return asyncio.run(_closed(template, at_once, seconds))


def measure_overload(
    template: RequestTemplate, *, per_s: float, seconds: float, read_metrics: Callable[[], str]
) -> Overload:
    """Run an open loop with Poisson arrivals. read_metrics: returns the text of /metrics."""
    meter = MetricsMeter(read_metrics)
    exchanges, offered_s, elapsed_s = asyncio.run(_open(template, per_s, seconds))
    return _overload(exchanges, meter.compare(exchanges), offered_s=offered_s, elapsed_s=elapsed_s)


def measure_crowd(
    template: RequestTemplate, *, clients: int, seconds: float, read_metrics: Callable[[], str]
) -> Overload:
    """Run a closed loop of too many clients, which obey `Retry-After`. read_metrics: returns the text of /metrics."""
    meter = MetricsMeter(read_metrics)
    exchanges, elapsed_s = asyncio.run(_crowd(template, clients, seconds))
    return _overload(exchanges, meter.compare(exchanges), offered_s=elapsed_s, elapsed_s=elapsed_s)


async def _closed(template: RequestTemplate, at_once: int, seconds: float) -> Latencies:
    texts, loop = read_prompts(template.prompts), asyncio.get_running_loop()
    end_s = loop.time() + seconds
    exchanges: list[Exchange] = []

    async def client(number: int) -> None:
        while loop.time() < end_s:
            exchanges.append(
                await ask(template.url, "/v1/completions", template.body(number + at_once * len(exchanges), texts))
            )

    began_s = loop.time()
    await asyncio.gather(*map(client, range(at_once)))
    _check(exchanges)
    return _latencies(exchanges, loop.time() - began_s)


async def _open(template: RequestTemplate, per_s: float, seconds: float) -> tuple[list[Exchange], float, float]:
    texts, rng, loop = read_prompts(template.prompts), random.Random(0), asyncio.get_running_loop()
    tasks: list[asyncio.Task[Exchange]] = []

    began_s = due_s = loop.time()
    while due_s < began_s + seconds:
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        tasks.append(asyncio.create_task(ask(template.url, "/v1/completions", template.body(len(tasks), texts))))
        due_s += rng.expovariate(per_s)
    offered_s = loop.time() - began_s
    exchanges, elapsed_s = await asyncio.gather(*tasks), loop.time() - began_s
    await asyncio.sleep(_SETTLE_S)
    return exchanges, offered_s, elapsed_s


def _overload(exchanges: Sequence[Exchange], agreement: Agreement, *, offered_s: float, elapsed_s: float) -> Overload:
    refused = [exchange for exchange in exchanges if exchange.status == _REFUSED]
    answered = [exchange for exchange in exchanges if exchange.is_whole]
    return Overload(
        len(exchanges) / offered_s,
        offered=len(exchanges),
        refused=len(refused),
        without_retry_after=sum(not (exchange.retry_after or "").isdigit() for exchange in refused),
        failed=len(exchanges) - len(refused) - len(answered),
        refusal_p50_s=_percentile([exchange.seconds for exchange in refused], 50),
        refusal_p99_s=_percentile([exchange.seconds for exchange in refused], 99),
        admitted=_latencies(answered, elapsed_s),
        agreement=agreement,
    )


async def _crowd(template: RequestTemplate, clients: int, seconds: float) -> tuple[list[Exchange], float]:
    texts, loop = read_prompts(template.prompts), asyncio.get_running_loop()
    began_s = loop.time()
    end_s = began_s + seconds
    exchanges: list[Exchange] = []

    async def client(number: int) -> None:
        while loop.time() < end_s:
            exchange = await ask(
                template.url, "/v1/completions", template.body(number + clients * len(exchanges), texts)
            )
            exchanges.append(exchange)
            if exchange.status == _REFUSED:
                await asyncio.sleep(min(float(exchange.retry_after or 0), max(0.0, end_s - loop.time())))

    await asyncio.gather(*map(client, range(clients)))
    elapsed_s = loop.time() - began_s
    await asyncio.sleep(_SETTLE_S)
    return exchanges, elapsed_s


def _check(exchanges: Sequence[Exchange]) -> None:
    broken = [exchange for exchange in exchanges if not exchange.is_whole]
    if broken:
        raise RuntimeError(
            f"{len(broken)} of {len(exchanges)} requests failed: {broken[0].status} {broken[0].body[-500:]!r}"
        )


def _latencies(exchanges: Sequence[Exchange], elapsed_s: float) -> Latencies:
    seconds = [exchange.seconds for exchange in exchanges]
    first = [exchange.first_s - exchange.began_s for exchange in exchanges if exchange.first_s is not None]
    return Latencies(
        len(exchanges),
        len(exchanges) / elapsed_s,
        _percentile(seconds, 50),
        _percentile(seconds, 99),
        _percentile(first, 99),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
