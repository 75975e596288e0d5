"""How much one long text slows the steps of the short ones beside it.

The model is random: few key-value heads and wide layers, so that the long text is a small share of the bytes of a step.
Texts are not computed; what is in the cache does not matter for the time.

python -m benchmarks.micro.long_row --output benchmarks/results/long-row.json
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import write
from engine.model.faster_layers import use_faster_layers
from engine.model.forward_input import RowInput
from engine.model.runner import Runner

_SHORT = 160  # tokens of a short text
_LAYERS, _HEAD_DIM = 4, 64
_COLUMN = 2 * _LAYERS * _HEAD_DIM * torch.bfloat16.itemsize  # bytes of a token's keys and values, of one head
_WARM_UP = 2  # rounds that are not counted


def main() -> None:
    """Print the ratio of the steps' times, and write JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(options.long))
    model.bfloat16()
    weights = sum(parameter.nbytes for name, parameter in model.named_parameters() if "embed" not in name)
    use_faster_layers(model)
    runner = Runner(model, slots=options.rows, max_length=options.long + 16, max_query=64)
    seconds: dict[int, list[float]] = {_SHORT: [], options.long: []}  # by the length of row 0
    with torch.inference_mode():
        for _ in range(_WARM_UP + options.rounds):
            for first, samples in seconds.items():
                samples.append(_step_s(runner, [first, *[_SHORT] * (options.rows - 1)]))
    short_s, long_s = (samples[_WARM_UP:] for samples in seconds.values())
    ratios = [after / before for before, after in zip(short_s, long_s, strict=True)]
    floor = 1 + (options.long - _SHORT) * _COLUMN / (weights + options.rows * _SHORT * _COLUMN)
    print(
        f"{options.rows} rows: {1e3 * statistics.median(short_s):.1f} ms a step; with one of {options.long} tokens "
        f"{1e3 * statistics.median(long_s):.1f} ms, {statistics.median(ratios):.3f} times (bytes: {floor:.3f})"
    )
    if options.output:
        findings = {"short_s": short_s, "long_s": long_s, "ratios": ratios, "bytes_ratio": floor}
        write(options.output, "benchmarks.micro.long_row", vars(options), **findings)


def _config(positions: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=positions + 64,
    )


def _step_s(runner: Runner, lengths: list[int]) -> float:
    rows = [RowInput(slot, length, [1]) for slot, length in enumerate(lengths)]
    began_s = time.perf_counter()
    runner.logits(rows).argmax(dim=-1).tolist()
    return time.perf_counter() - began_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--long", type=int, default=32_000, help="tokens of the long text")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
