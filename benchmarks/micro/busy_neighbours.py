"""One stream's speed beside processes that never wait, of any servers with OpenAI's API that are up.

python -m benchmarks.micro.busy_neighbours --url http://127.0.0.1:8000 --url http://127.0.0.1:8081 --neighbours 0 1 2
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.models import HELD_OUT
from benchmarks.report import write
from evaluation.metrics import table
from evaluation.prompts import read_prompts

_SETTLING_TOKENS = 64  # of an answer that does not count, after the neighbours have changed


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Keep so many cores busy, as far as there are any."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _tokens_per_s(url: str, prompt: str, tokens: int) -> float:
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()["usage"]
    return float(usage["completion_tokens"]) / (time.perf_counter() - began_s)


def main() -> None:
    """Measure servers in turn, each with prompts that it has not seen, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts = (f"{number} {text}" for number, text in enumerate(itertools.cycle(read_prompts(HELD_OUT))))
    speeds: dict[str, dict[int, list[float]]] = {url: {n: [] for n in options.neighbours} for url in options.url}
    for _, count, url in itertools.product(range(options.rounds), options.neighbours, options.url):
        with _neighbours(count):
            _tokens_per_s(url, next(prompts), _SETTLING_TOKENS)
            speeds[url][count].append(_tokens_per_s(url, next(prompts), options.tokens))
    rows = []
    for url, by_count in speeds.items():
        quiet = median(by_count[min(by_count)])
        rows.append([url, *(f"{median(each):.1f} ({median(each) / quiet:.2f})" for each in by_count.values())])
    print(table(["tokens/s (of the quiet speed)", *map(str, options.neighbours)], rows))
    if options.output is not None:
        write(options.output, "benchmarks.micro.busy_neighbours", vars(options), speeds=speeds)


if __name__ == "__main__":
    main()
