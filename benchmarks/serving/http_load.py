"""`python -m benchmarks.serving.http_load`: more requests than a server can answer, and what its `/metrics` say.

A load generator keeps as many requests in flight as it is told to. This one offers a rate that no server answers
(`--overload`), or plays a crowd that obeys `Retry-After` (`--crowd`). See docs/operation.md for results.
"""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.models import HELD_OUT
from benchmarks.report import write
from benchmarks.serving.client import Exchange, complete, percentile
from benchmarks.serving.servers import ConsortServer
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config
from evaluation.prompts import read_prompts

_REFUSED = HTTPStatus.TOO_MANY_REQUESTS
_SETTLE_S = 1.0  # until the metrics have what the proxy refused


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

    def as_text(self, capacity: Latencies) -> str:
        admitted = self.admitted
        lines = (
            f"{self.offered_per_s:.0f} requests/s offered, {admitted.per_s:.1f}/s answered, "
            f"{admitted.per_s / capacity.per_s:.2f} times those at capacity, {self.failed} failed",
            f"{self.refused} refused, p50 {self.refusal_p50_s:.2f} s, p99 {self.refusal_p99_s:.2f} s, "
            f"{self.without_retry_after} without Retry-After",
            f"admitted requests' p50 {admitted.p50_s:.2f} s, p99 {admitted.p99_s:.2f} s, "
            f"{admitted.p99_s / capacity.p99_s:.2f} times that at capacity",
            *(
                f"  {name}: clients {pair.seen:.4g}, /metrics {pair.told:.4g}, {pair.error:.2%} off"
                for name, pair in self.agreement.pairs().items()
            ),
        )
        return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--overload", default=20.0, help="Offered load as a multiple of the capacity; 0: skip that.")
@click.option("--crowd", default=0.0, help="Clients per slot that obey `Retry-After`; 0: skip that.")
@click.option("--slots", default=16, help="Of each model.")
@click.option("--seconds", default=20.0, help="Of each load.")
@click.option("--new-tokens", default=128, help="Of each answer.")
@click.option("--max-requests", type=int, help="`http.max_requests`; by default as the server has it.")
@click.option("--max-queue-wait", default=0.0, help="`http.max_queue_wait_s`; 0: half as long as an answer takes.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/http-load.json"))
def main(**given: Any) -> None:
    """Serve the bundled models, load, print, and write JSON."""
    options = SimpleNamespace(**given)
    config, slots, seconds = _config(options), options.slots, options.seconds
    loads: dict[str, Overload] = {}
    with ConsortServer(config, folder=options.output.parent) as server:
        clients = Clients(server.url, options.new_tokens)

        def beyond(load: Awaitable[float]) -> Overload:
            meter = MetricsMeter(server.read_metrics)
            exchanges, offered_s, elapsed_s = clients.run(load)
            return _overload(exchanges, meter.compare(exchanges), offered_s=offered_s, elapsed_s=elapsed_s)

        clients.at_capacity(slots, seconds / 4)  # warms up
        capacity = clients.at_capacity(slots, seconds)
        if options.overload:
            loads["overload"] = beyond(clients.arrivals(options.overload * capacity.per_s, seconds))
        if options.crowd:
            loads["crowd"] = beyond(clients.loop(round(options.crowd * slots), seconds))
        again = clients.at_capacity(slots, seconds)
    click.echo(f"at capacity: {capacity}\nagain afterwards: {again}")
    for name, load in loads.items():
        click.echo(f"{name}: {load.as_text(capacity)}")
    settings = vars(options) | {"server": config.model_dump(mode="json")}
    results = {name: asdict(load) for name, load in loads.items()}
    write(
        options.output,
        "benchmarks.serving.http_load",
        settings,
        at_capacity=[asdict(capacity), asdict(again)],
        **results,
    )


def _config(options: SimpleNamespace) -> ServerConfig:
    """Return the bundled models' configuration with a thread per model."""
    config = load_config(TINY_CONFIG)
    for model in config.models.values():
        model.threads, model.slots = 1, options.slots
    config.http.max_queue_wait_s = options.max_queue_wait
    if options.max_requests is not None:
        config.http.max_requests = options.max_requests
    return config


class Clients:
    """Clients of one server, which stream completions of fixed length."""

    def __init__(self, url: str, new_tokens: int) -> None:
        self._url, self._new_tokens = url, new_tokens
        self._prompts, self._numbers = read_prompts(HELD_OUT), itertools.count()
        self._exchanges: list[Exchange] = []

    def run(self, load: Awaitable[float]) -> tuple[list[Exchange], float, float]:
        """Return the exchanges of a load, the seconds in which requests came, and those until all had ended."""
        self._exchanges = []

        async def run() -> tuple[float, float]:
            began_s = asyncio.get_running_loop().time()
            offered_s = await load
            elapsed_s = asyncio.get_running_loop().time() - began_s
            await asyncio.sleep(_SETTLE_S)
            return offered_s, elapsed_s

        return self._exchanges, *asyncio.run(run())

    def at_capacity(self, clients: int, seconds: float) -> Latencies:
        """Run as many clients as there are slots. Raises RuntimeError if a request fails."""
        exchanges, _, elapsed_s = self.run(self.loop(clients, seconds))
        broken = [exchange for exchange in exchanges if not exchange.is_whole]
        if broken:
            message = f"{broken[0].status} {broken[0].body[-500:]!r}"
            raise RuntimeError(f"{len(broken)} of {len(exchanges)} requests failed: {message}")
        return _latencies(exchanges, elapsed_s)

    async def loop(self, clients: int, seconds: float) -> float:
        """Let each client send its next request when it has its answer; a refused one obeys `Retry-After`."""
        now_s = asyncio.get_running_loop().time
        began_s = now_s()

        async def client() -> None:
            while (left_s := began_s + seconds - now_s()) > 0:
                exchange = await self._ask()
                if exchange.status == _REFUSED:
                    await asyncio.sleep(min(float(exchange.retry_after or 0), max(0.0, left_s - exchange.seconds)))

        await asyncio.gather(*(client() for _ in range(clients)))
        return now_s() - began_s

    async def arrivals(self, per_s: float, seconds: float) -> float:
        """Send requests at random times (Poisson), whether others have been answered or not."""
        rng, now_s = random.Random(0), asyncio.get_running_loop().time
        began_s = due_s = now_s()
        tasks = []
        while due_s < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - now_s()))
            tasks.append(asyncio.create_task(self._ask()))
            due_s += rng.expovariate(per_s)
        offered_s = now_s() - began_s
        await asyncio.gather(*tasks)
        return offered_s

    async def _ask(self) -> Exchange:
        number = next(self._numbers)
        body = {"model": "consort", "prompt": self._prompts[number % len(self._prompts)], "seed": number}
        exchange = await complete(
            self._url, {**body, "max_tokens": self._new_tokens, "ignore_eos": True, "stream": True}
        )
        self._exchanges.append(exchange)
        return exchange


def _overload(exchanges: Sequence[Exchange], agreement: Agreement, *, offered_s: float, elapsed_s: float) -> Overload:
    refused = [exchange for exchange in exchanges if exchange.status == _REFUSED]
    answered = [exchange for exchange in exchanges if exchange.is_whole]
    return Overload(
        len(exchanges) / offered_s,
        offered=len(exchanges),
        refused=len(refused),
        without_retry_after=sum(not (exchange.retry_after or "").isdigit() for exchange in refused),
        failed=len(exchanges) - len(refused) - len(answered),
        refusal_p50_s=percentile([exchange.seconds for exchange in refused], 50),
        refusal_p99_s=percentile([exchange.seconds for exchange in refused], 99),
        admitted=_latencies(answered, elapsed_s),
        agreement=agreement,
    )


def _latencies(exchanges: Sequence[Exchange], elapsed_s: float) -> Latencies:
    seconds = [exchange.seconds for exchange in exchanges]
    first = [exchange.first_s - exchange.began_s for exchange in exchanges if exchange.first_s is not None]
    p50_s, p99_s = (percentile(seconds, percent) for percent in (50, 99))
    return Latencies(len(exchanges), len(exchanges) / elapsed_s, p50_s, p99_s, percentile(first, 99))


if __name__ == "__main__":
    main()
