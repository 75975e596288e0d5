"""One long prompt among short ones: how late are the first tokens of each, and how long do running streams stand still?

The model is random and has the sizes of a small one. A round reads the long prompt twice: beside one stream, and beside
that stream and short requests, the next of which comes as soon as the last has ended.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actors.coordinator.request import Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from benchmarks.report import write
from decoding.sampling.params import SamplingParams
from engine.layers.faster_layers import use_faster_layers
from engine.model.runner import Runner

_VOCAB = 4096
_ENDPOINT = Endpoint("plain", "target", None, 0, decode=str)
_SHORT_TOKENS = 4  # of a short answer


def main() -> None:
    """Print medians over all rounds, and write JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    length = options.long + 5000
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length + 64,
    )
    model = LlamaForCausalLM(config).bfloat16()
    use_faster_layers(model)
    runner = Runner(model, slots=options.short_streams + 2, max_length=length, max_query=options.chunk)
    with Engine({"target": ("target", runner)}, LoopOptions(prefill_chunk=options.chunk)) as engine:
        stage = _Stage(engine, options.short)
        stage.stream(options.short, 2 * _SHORT_TOKENS)  # warm up
        rounds = [
            {"alone": stage.round(options.long, 0), "crowded": stage.round(options.long, options.short_streams)}
            for _ in range(options.rounds)
        ]
    print(_as_text(rounds))
    if options.output:
        write(options.output, "benchmarks.micro.long_prompt", vars(options), rounds=rounds)


class _Stage:
    """Asks one engine, from a thread for each stream."""

    def __init__(self, engine: Engine, short: int) -> None:
        self._engine, self._short = engine, short
        self._rng = random.Random(0)

    def stream(self, prompt: int, tokens: int, until: Callable[[], bool] = lambda: False) -> list[float]:
        """Return when each token came, in seconds after the request. until: whether to stop before the end."""
        text = [self._rng.randrange(_VOCAB) for _ in range(prompt)]
        request = Request(_ENDPOINT, text, SamplingParams(max_tokens=tokens, temperature=0))
        times: list[float] = []
        began_s = time.perf_counter()
        for _ in self._engine.stream(request):
            times.append(time.perf_counter() - began_s)
            if until():
                break
        return times

    def round(self, long: int, short_streams: int) -> dict[str, list[float]]:
        """Read a long prompt beside a running stream and short requests. Return seconds."""
        has_ended = threading.Event()

        def ask() -> list[float]:
            first_s = []
            while not has_ended.is_set():
                first_s.append(self.stream(self._short, _SHORT_TOKENS)[0])
            return first_s

        with ThreadPoolExecutor(1 + short_streams) as pool:
            running = pool.submit(self.stream, self._short, 4000, has_ended.is_set)
            short = [pool.submit(ask) for _ in range(short_streams)]
            try:
                long_s = self.stream(long, 1)
            finally:
                has_ended.set()
        gaps_s = [after - before for before, after in pairwise(running.result())]
        return {"long_first_s": long_s, "short_first_s": [s for each in short for s in each.result()], "gaps_s": gaps_s}


def _as_text(rounds: list[dict[str, dict[str, list[float]]]]) -> str:
    def of(way: str, name: str) -> list[float]:
        return sorted(value for each in rounds for value in each[way][name])

    alone, crowded = (statistics.median(of(way, "long_first_s")) for way in ("alone", "crowded"))
    short, gaps = of("crowded", "short_first_s"), of("crowded", "gaps_s")
    return (
        f"long prompt: first token after {alone:.2f} s, among short ones {crowded:.2f} s ({crowded / alone:.2f} ×)\n"
        f"{len(short)} short ones: after {1e3 * statistics.median(short):.0f} ms, at most {1e3 * short[-1]:.0f} ms\n"
        f"running stream: a step takes {1e3 * statistics.median(gaps):.0f} ms, the longest {1e3 * gaps[-1]:.0f} ms"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=32_000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=30, help="tokens of a short prompt")
    parser.add_argument("--short-streams", type=int, default=1, help="short requests at any time")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
