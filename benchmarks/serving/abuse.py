"""Rounds of heavy and hostile requests, and the memory that the server's processes keep after each."""

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from benchmarks.serving.http_server import Footprint, ServeProcess

_SETTLE_S = 60.0
_REST_S = 12.0  # in which the server gives memory back
_KINDS = 8
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class AbuseRound:
    """What came of a round, and what the server holds after it."""

    statuses: dict[str, int]  # number of responses
    freed_s: float | None  # from the last response until the server was idle; None: it was not
    after: Footprint


def measure_abuse(server: ServeProcess, *, model: str, rounds: int, requests: int, at_once: int) -> list[AbuseRound]:
    """Send as many requests in each round, all different. Memory that grows from round to round is a leak."""
    results = []
    for number in range(rounds):
        rng = random.Random(number)
        statuses = Counter[str]()
        with ThreadPoolExecutor(at_once) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
            bodies = [hostile_body(index % _KINDS, rng) | {"model": model} for index in range(requests)]
            statuses.update(pool.map(lambda body: _send(client, body), bodies))
        freed_s = server.wait_until_idle(_SETTLE_S)
        time.sleep(_REST_S)
        results.append(AbuseRound(dict(statuses), freed_s, server.footprint()))
    return results


def hostile_body(kind: int, rng: random.Random) -> dict[str, object]:
    """Return the body of a completion that asks for much. kind: below 8."""
    salt = f"{rng.getrandbits(64):x}"
    words = " ".join(f"{rng.getrandbits(20):x}" for _ in range(200))
    short: dict[str, object] = {"prompt": words, "max_tokens": 64, "seed": rng.getrandbits(32), "ignore_eos": True}
    bodies: list[dict[str, object]] = [
        short | {"prompt": salt + "x" * 5_000_000},
        short | {"logprobs": 20, "n": 8, "stream": True},
        short | {salt * 10: list(range(100_000))},
        short | {"prompt": [f"{words} {index}" for index in range(64)], "max_tokens": 4},
        short | {"structured_outputs": {"regex": f"({salt}|.*[a-m].{{200}}x)*"}},
        short | {"structured_outputs": {"choice": [f"{salt}{index}" for index in range(900)]}},
        short | {"stop": [salt, "\n"], "prompt_logprobs": 20},
        short | {"stream": True, "return_token_details": True},
    ]
    return bodies[kind]


def _send(client: httpx.Client, body: dict[str, object]) -> str:
    try:
        return str(client.post("/v1/completions", content=json.dumps(body), headers=_JSON).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__
