"""Benefit of prefix caching: the time to the first token of a new and of a repeated prompt.

python -m benchmarks.micro.prefix --output benchmarks/results/prefix.json
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from actors.coordinator.request import Endpoint, Request
from actors.replica.in_process import Engine
from actors.replica.replica import load_runner
from benchmarks.inflated import inflated_target
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from engine.loading.settings import load_tokenizer
from training.heldout import read_prompts


def main() -> None:
    """Print and write the medians, and whether the texts were the same."""
    options = _options()
    folder = inflated_target()
    text = "\n".join(read_prompts(Path("models/heldout.jsonl")))
    tokens = load_tokenizer(str(folder)).encode(text)
    spec = ModelSpec(
        name="target", path=str(folder), device="cpu", slots=4, max_length=options.prompt + 16, threads=options.threads
    )
    cold_s, repeated_s, same = [], [], True
    with Engine({"target": ("target", load_runner(spec))}) as engine:
        for i in range(options.repetitions):
            prompt = tokens[i * options.prompt :][: options.prompt]
            (first_s, first), (again_s, again) = _ask(engine, prompt), _ask(engine, prompt)
            cold_s.append(first_s)
            repeated_s.append(again_s)
            same &= first == again
    result = {
        "prompt_tokens": options.prompt,
        "threads": options.threads,
        "repetitions": options.repetitions,
        "cold_ttft_s": statistics.median(cold_s),
        "repeated_ttft_s": statistics.median(repeated_s),
        "share": statistics.median(repeated_s) / statistics.median(cold_s),
        "same_text": same,
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _ask(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the answer."""
    endpoint = Endpoint("prefix", "target", None, 0, decode=lambda tokens: "")
    began_s = time.perf_counter()
    stream = engine.stream(Request(endpoint, prompt, SamplingParams(max_tokens=8, temperature=0)))
    first = next(stream)
    first_s = time.perf_counter() - began_s
    return first_s, [*first.tokens, *(token for delta in stream for token in delta.tokens)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
