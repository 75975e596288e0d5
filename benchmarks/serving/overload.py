"""How admitted requests fare when far more come than the server can answer, beside how they fare at its capacity."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.http_exchange import Exchange, ask
from training.heldout import read_prompts

_OK, _REFUSED = 200, 429


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of answered requests, in seconds from connecting to the last byte."""

    answered: int
    per_s: float
    p50_s: float
    p99_s: float
    first_p99_s: float  # to the first byte of the answer


@dataclass(frozen=True, slots=True)
class Overload:
    """Requests that come so often, whether others are answered or not."""

    offered_per_s: float
    offered: int
    refused: int
    without_retry_after: int  # refused ones that were not told when to come back
    failed: int  # neither answered nor refused
    refusal_p99_s: float
    admitted: Latencies


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked."""

    url: str
    model: str
    prompts: Path
    new_tokens: int

    def body(self, index: int, texts: Sequence[str]) -> dict[str, object]:
        """A streamed completion of fixed length."""
        return {
            "model": self.model,
            "prompt": texts[index % len(texts)],
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": index,
        }


def at_capacity(asking: Asking, *, at_once: int, seconds: float) -> Latencies:
    """A closed loop: so many clients, each with one request at a time."""
    return asyncio.run(_closed(asking, at_once, seconds))


def overloaded(asking: Asking, *, per_s: float, seconds: float) -> Overload:
    """An open loop: Poisson arrivals."""
    return asyncio.run(_open(asking, per_s, seconds))


def crowded(asking: Asking, *, clients: int, seconds: float) -> Overload:
    """A closed loop of too many clients, who come back when `Retry-After` says."""
    return asyncio.run(_crowd(asking, clients, seconds))


async def _closed(asking: Asking, at_once: int, seconds: float) -> Latencies:
    texts, loop = read_prompts(asking.prompts), asyncio.get_running_loop()
    end_s = loop.time() + seconds
    seen: list[Exchange] = []

    async def client(number: int) -> None:
        while loop.time() < end_s:
            seen.append(await ask(asking.url, "/v1/completions", asking.body(number + at_once * len(seen), texts)))

    began_s = loop.time()
    await asyncio.gather(*map(client, range(at_once)))
    _check(seen)
    return _latencies(seen, loop.time() - began_s)


async def _open(asking: Asking, per_s: float, seconds: float) -> Overload:
    texts, rng, loop = read_prompts(asking.prompts), random.Random(0), asyncio.get_running_loop()
    tasks: list[asyncio.Task[Exchange]] = []

    began_s = due_s = loop.time()
    while due_s < began_s + seconds:
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        tasks.append(asyncio.create_task(ask(asking.url, "/v1/completions", asking.body(len(tasks), texts))))
        due_s += rng.expovariate(per_s)
    offered_s = loop.time() - began_s
    seen = await asyncio.gather(*tasks)
    return _overload(seen, offered_s=offered_s, elapsed_s=loop.time() - began_s)


def _overload(seen: Sequence[Exchange], *, offered_s: float, elapsed_s: float) -> Overload:
    refused = [one for one in seen if one.status == _REFUSED]
    answered = [one for one in seen if _whole(one)]
    return Overload(
        len(seen) / offered_s,
        offered=len(seen),
        refused=len(refused),
        without_retry_after=sum(not (one.retry_after or "").isdigit() for one in refused),
        failed=len(seen) - len(refused) - len(answered),
        refusal_p99_s=_percentile([one.seconds for one in refused], 99),
        admitted=_latencies(answered, elapsed_s),
    )


async def _crowd(asking: Asking, clients: int, seconds: float) -> Overload:
    texts, loop = read_prompts(asking.prompts), asyncio.get_running_loop()
    began_s = loop.time()
    end_s = began_s + seconds
    seen: list[Exchange] = []

    async def client(number: int) -> None:
        while loop.time() < end_s:
            heard = await ask(asking.url, "/v1/completions", asking.body(number + clients * len(seen), texts))
            seen.append(heard)
            if heard.status == _REFUSED:
                await asyncio.sleep(min(float(heard.retry_after or 0), max(0.0, end_s - loop.time())))

    await asyncio.gather(*map(client, range(clients)))
    return _overload(seen, offered_s=loop.time() - began_s, elapsed_s=loop.time() - began_s)


def _check(seen: Sequence[Exchange]) -> None:
    broken = [one for one in seen if not _whole(one)]
    if broken:
        raise RuntimeError(
            f"{len(broken)} of {len(seen)} requests failed: {broken[0].status} {broken[0].body[-500:]!r}"
        )


def _whole(exchange: Exchange) -> bool:
    return exchange.status == _OK and b"data: [DONE]" in exchange.body


def _latencies(seen: Sequence[Exchange], elapsed_s: float) -> Latencies:
    seconds = [one.seconds for one in seen]
    first = [one.first_s - one.began_s for one in seen if one.first_s is not None]
    return Latencies(
        len(seen), len(seen) / elapsed_s, _percentile(seconds, 50), _percentile(seconds, 99), _percentile(first, 99)
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent don't exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
