"""One stream's speed beside processes that never wait, of any servers with OpenAI's API that are up.

python -m benchmarks.micro.busy_neighbours --url http://127.0.0.1:8000 --url http://127.0.0.1:8081 --neighbours 0 1 2
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.report import table, write
from training.heldout import read_prompts

_PROMPTS = Path("models/heldout.jsonl")
_SETTLING_TOKENS = 64  # of an answer that does not count, after the neighbours have changed


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep so many cores busy, as far as there are any."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def speed(url: str, prompt: str, tokens: int) -> float:
    """Return the tokens per second of one answer, its prompt included."""
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()["usage"]
    return float(usage["completion_tokens"]) / (time.perf_counter() - began_s)


def measure(
    urls: Sequence[str], counts: Sequence[int], rounds: int, tokens: int
) -> Mapping[str, Mapping[int, list[float]]]:
    """Return speeds by server and number of neighbours. All prompts differ."""
    numbers, prompts = itertools.count(), itertools.cycle(read_prompts(_PROMPTS))
    results: dict[str, dict[int, list[float]]] = {url: {count: [] for count in counts} for url in urls}
    for _, count in itertools.product(range(rounds), counts):
        for url in urls:
            with neighbours(count):
                speed(url, f"{next(numbers)} {next(prompts)}", _SETTLING_TOKENS)
                results[url][count].append(speed(url, f"{next(numbers)} {next(prompts)}", tokens))
    return results


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = measure(options.url, options.neighbours, options.rounds, options.tokens)
    medians = {url: {count: statistics.median(speeds) for count, speeds in of.items()} for url, of in results.items()}
    quiet = min(options.neighbours)
    rows = [
        [url, *(f"{of[count]:.1f} ({of[count] / of[quiet]:.2f})" for count in options.neighbours)]
        for url, of in medians.items()
    ]
    print(table(["tokens/s (of the quiet speed)", *map(str, options.neighbours)], rows))
    if options.output is not None:
        write(options.output, "benchmarks.micro.busy_neighbours", vars(options), speeds=results)


if __name__ == "__main__":
    main()
