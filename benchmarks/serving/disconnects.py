"""Clients that hang up at random moments, and whether they leave anything behind."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.http_exchange import break_off
from benchmarks.serving.http_server import Footprint, ServeProcess
from training.heldout import read_prompts

_LONGEST_S = 1.5  # that a client stays
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Disconnects:
    """What a round of clients left behind."""

    clients: int
    freed_s: float | None  # from the last client's end until nothing was in progress; None: something remained
    before: Footprint
    after: Footprint


def measure_disconnects(
    server: ServeProcess, *, model: str, prompts: Path, clients: int, rounds: int, at_once: int, new_tokens: int
) -> list[Disconnects]:
    """Rounds of clients, after one that only warms up: memory that still grows from round to round is a leak."""
    texts, found = read_prompts(prompts), []
    for number in range(rounds + 1):
        before = server.footprint()
        bodies = [
            {"model": model, "max_tokens": new_tokens, "stream": index % 3 != 0, "ignore_eos": True, "seed": index}
            | {"prompt": texts[index % len(texts)], "n": 1 + index % 2}
            for index in range(clients)
        ]
        asyncio.run(_hang_up(server.url, bodies, random.Random(number), at_once))
        freed_s = server.wait_until_idle(_SETTLE_S)
        found.append(Disconnects(clients, freed_s, before, server.footprint()))
    return found[1:]


async def _hang_up(url: str, bodies: list[dict[str, object]], rng: random.Random, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(body: dict[str, object]) -> None:
        async with gate:
            after_s = rng.uniform(0, _LONGEST_S) ** 2 / _LONGEST_S  # many leave early
            await break_off(url, "/v1/completions", body, after_s=after_s, rng=rng)

    await asyncio.gather(*map(one, bodies))
