"""Clients that disconnect at random moments, and the resources that the server keeps afterwards."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.http_exchange import ask_and_disconnect
from benchmarks.serving.http_server import Footprint, ServeProcess
from training.heldout import read_prompts

_LONGEST_S = 1.5  # maximum duration of a connection
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Disconnects:
    """The server's state before and after a round of clients."""

    clients: int
    freed_s: float | None  # from the last client's end until the server was idle; None: it was not
    before: Footprint
    after: Footprint


def measure_disconnects(
    server: ServeProcess, *, model: str, prompts: Path, clients: int, rounds: int, at_once: int, new_tokens: int
) -> list[Disconnects]:
    """Measure rounds of clients after a warm-up round. Memory that grows from round to round is a leak."""
    texts, results = read_prompts(prompts), []
    for number in range(rounds + 1):
        before = server.footprint()
        bodies = [
            {"model": model, "max_tokens": new_tokens, "stream": index % 3 != 0, "ignore_eos": True, "seed": index}
            | {"prompt": texts[index % len(texts)], "n": 1 + index % 2}
            for index in range(clients)
        ]
        asyncio.run(_hang_up(server.url, bodies, random.Random(number), at_once))
        freed_s = server.wait_until_idle(_SETTLE_S)
        results.append(Disconnects(clients, freed_s, before, server.footprint()))
    return results[1:]


async def _hang_up(url: str, bodies: list[dict[str, object]], rng: random.Random, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def connect(body: dict[str, object]) -> None:
        async with gate:
            after_s = rng.uniform(0, _LONGEST_S) ** 2 / _LONGEST_S  # mostly early
            await ask_and_disconnect(url, "/v1/completions", body, after_s=after_s, rng=rng)

    await asyncio.gather(*map(connect, bodies))
