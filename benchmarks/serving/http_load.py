"""`python -m benchmarks.serving.http_load`: more requests than a server can answer, and what its `/metrics` say.

A load generator keeps as many requests in flight as it is told to. This one offers a rate that no server answers
(`--overload`), or plays a crowd that obeys `Retry-After` (`--crowd`). See docs/operation.md for results.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.models import HELD_OUT
from benchmarks.report import write
from benchmarks.serving.exchange import Agreement, Exchange, MetricsMeter, complete
from benchmarks.serving.servers import ConsortServer
from deployments.configuration.config import TINY_CONFIG, ServerConfig, load_config
from evaluation.prompts import read_prompts

_REFUSED = HTTPStatus.TOO_MANY_REQUESTS
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
        refusal_p50_s=_percentile([exchange.seconds for exchange in refused], 50),
        refusal_p99_s=_percentile([exchange.seconds for exchange in refused], 99),
        admitted=_latencies(answered, elapsed_s),
        agreement=agreement,
    )


def _latencies(exchanges: Sequence[Exchange], elapsed_s: float) -> Latencies:
    seconds = [exchange.seconds for exchange in exchanges]
    first = [exchange.first_s - exchange.began_s for exchange in exchanges if exchange.first_s is not None]
    p50_s, p99_s = (_percentile(seconds, percent) for percent in (50, 99))
    return Latencies(len(exchanges), len(exchanges) / elapsed_s, p50_s, p99_s, _percentile(first, 99))


def _percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


if __name__ == "__main__":
    main()
