"""`python -m benchmarks.serving.constant_load`: a running server with drafts and without, in turn, at a constant load.

A stream sends its next request when it has its answer. So answers that end early leave no stream idle, as they do at
the end of a fixed number of requests. Every measurement finds its prompts in the cache, or none does. Unless a server's
first seconds are of interest, a measurement that does not count comes before those of each load: by then the server has
tried drafts with so many rows, and recorded the sizes of its steps.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from urllib.request import urlopen

import click
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import table, write
from benchmarks.serving.http_exchange import ask
from training.heldout import read_prompts

_COUNTER = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second of one load, by round."""

    temperature: float
    streams: int
    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)

    def row(self) -> Sequence[str]:
        """Return the cells of a table."""
        ratios = [on / off for on, off in zip(self.on, self.off, strict=True)]
        error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
        rates = f"{mean(self.on):.1f}", f"{mean(self.off):.1f}"
        return f"{self.temperature:g}", str(self.streams), *rates, f"{mean(ratios):.3f}", f"{error:.3f}"


class ConstantLoad:
    """Streams of requests to one model of a server."""

    def __init__(
        self, url: str, model: str, prompts: Sequence[str], new_tokens: int, *, settling_s: float, fresh: bool
    ) -> None:
        """
        settling_s: from the first request until the measurement begins.
        fresh: let each prompt begin with a number that no other has.
        """
        self._url, self._model, self._prompts, self._new_tokens = url, model, prompts, new_tokens
        self._settling_s, self._fresh = settling_s, fresh
        self._indices = itertools.count()
        self._run = int(time.time()) % 1000  # the server may know the prompts of other runs

    async def read_prompts(self) -> None:
        """Let the server read all prompts, one by one."""
        for prompt in self._prompts:
            await self._ask({"prompt": prompt, "max_tokens": 1, "temperature": 0})

    async def tokens_per_s(self, streams: int, temperature: float, seconds: float, *, speculate: bool) -> float:
        """Measure for some seconds, by the server's own count. Requests in flight are given up afterwards."""
        options = {"temperature": temperature, **({} if speculate else {"speculate": False})}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(options, (i + 1) / streams)) for i in range(streams)]
            await asyncio.sleep(self._settling_s)
            before, began_s = await asyncio.to_thread(self._count), time.monotonic()
            await asyncio.sleep(seconds)
            tokens = await asyncio.to_thread(self._count) - before
            took_s = time.monotonic() - began_s
            for task in tasks:
                task.cancel()
        return tokens / took_s

    async def _stream(self, options: Mapping[str, object], first: float) -> None:
        """Send one request after the other. first: the relative length of the first answer."""
        max_tokens = max(1, round(first * self._new_tokens))
        while True:
            index = next(self._indices)
            prompt = self._prompts[index % len(self._prompts)]
            prompt = f"{index}/{self._run} {prompt}" if self._fresh else prompt
            await self._ask({"prompt": prompt, "seed": index, "max_tokens": max_tokens, **options})
            max_tokens = self._new_tokens

    async def _ask(self, body: Mapping[str, object]) -> None:
        exchange = await ask(
            self._url, "/v1/completions", {"model": self._model, "ignore_eos": True, "stream": True, **body}
        )
        if not exchange.is_whole:
            raise RuntimeError(f"status {exchange.status}: {exchange.body[-200:]!r}")

    def _count(self) -> float:
        with urlopen(f"{self._url}/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == _COUNTER)


@click.command(context_settings={"show_default": True})
@click.option("--url", default="http://127.0.0.1:8000", help="Of a server that nothing else loads.")
@click.option("--model", required=True)
@click.option("--prompts", type=click.Path(path_type=Path), default=Path("models/heldout.jsonl"))
@click.option("--streams", type=int, multiple=True, default=(1, 4, 8, 16, 32, 64))
@click.option("--temperature", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@click.option("--seconds", default=10.0, help="Of each measurement.")
@click.option("--settling", default=3.0, help="Seconds before each; 0: of a server that has just begun, all counts.")
@click.option("--rounds", default=4, help="Of measurements with drafts and without.")
@click.option("--new-tokens", default=128, help="Of each answer.")
@click.option("--fresh", is_flag=True, help="Number the prompts, so that none is in the cache; else all are.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(".bench/constant-load.json"))
def main(
    url: str,
    model: str,
    prompts: Path,
    streams: Sequence[int],
    temperatures: Sequence[float],
    seconds: float,
    settling: float,
    rounds: int,
    new_tokens: int,
    fresh: bool,
    output: Path,
) -> None:
    """Measure, write JSON after each load, and print."""
    load = ConstantLoad(url, model, read_prompts(prompts), new_tokens, settling_s=settling, fresh=fresh)
    settings = {"model": model, "seconds": seconds, "settling": settling, "rounds": rounds, "new_tokens": new_tokens}
    settings["fresh"] = fresh
    if not fresh:
        asyncio.run(load.read_prompts())
    comparisons: list[Comparison] = []
    for temperature, count in itertools.product(temperatures, streams):
        comparison = Comparison(temperature, count)
        if settling:
            asyncio.run(load.tokens_per_s(count, temperature, seconds, speculate=True))
        for number in range(2 * rounds):
            speculate = number % 4 in (0, 3)
            rate = asyncio.run(load.tokens_per_s(count, temperature, seconds, speculate=speculate))
            (comparison.on if speculate else comparison.off).append(rate)
        comparisons.append(comparison)
        write(output, "benchmarks.serving.constant_load", settings, loads=[asdict(c) for c in comparisons])
    click.echo(table(("T", "streams", "on", "off", "on / off", "standard error"), [c.row() for c in comparisons]))


if __name__ == "__main__":
    main()
