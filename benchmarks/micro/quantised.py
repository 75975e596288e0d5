"""Quantised targets: memory, step time, and acceptance when a quantised copy drafts for the target.

python -m benchmarks.micro.quantised            # the bundled target
python -m benchmarks.micro.quantised --inflated # inflated to 285 M parameters
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM

from actors.replica.replica import load_runner
from benchmarks.inflated import inflated_target
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.memory_budget import weights_on_devices
from engine.loading.settings import load_tokenizer
from engine.model.forward_input import RowInput
from engine.model.runner import Runner
from training.acceptance import measure
from training.heldout import read_prompts

_PROMPT_TOKENS = 64
_REPETITIONS = 20
_DRAFT_LENGTH = 4


def main() -> None:
    """Print a JSON object per model."""
    options = _options()
    torch.set_num_threads(options.threads)
    folder = inflated_target() if options.inflated else Path("models/target")
    tokenizer = load_tokenizer(str(folder))
    prompts = [tokenizer.encode(prompt)[:_PROMPT_TOKENS] for prompt in read_prompts(Path("models/heldout.jsonl"))]
    prompts = [prompt for prompt in prompts if len(prompt) == _PROMPT_TOKENS][: options.prompts]
    target = cast(LlamaForCausalLM, load_model(_spec(folder, "float32", None)))
    copies: list[tuple[Path, str, str | None]] = [(folder, "float32", None), (folder, "bfloat16", None)]
    copies += [(folder, dtype, kind) for kind in ("int8", "nf4") for dtype in ("float32", "bfloat16")]
    for path, dtype, kind in [*copies, (Path("models/drafter"), "float32", None)]:
        spec = _spec(path, dtype, kind)
        result = {"model": str(path), "dtype": dtype, "quantization": kind, **_cost(spec)}
        print(json.dumps(result | _acceptance(target, spec, prompts, options.tokens)), flush=True)


def _spec(path: Path, dtype: str, kind: Any) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), dtype=dtype, quantization=kind, device="cpu", slots=1, max_length=256)


def _cost(spec: ModelSpec) -> dict[str, float]:
    """Return the MiB of the weights, and the ms of a step of one row."""
    weights = sum(weights_on_devices(load_model(spec)).values())
    runner = load_runner(spec)
    steps = {f"step_{count}_ms": round(_step_ms(runner, count), 2) for count in (1, 1 + _DRAFT_LENGTH)}
    return {"weights_mib": round(weights / 2**20, 1), **steps}


def _step_ms(runner: Runner, tokens: int) -> float:
    """Return the median ms of a step of `tokens` tokens after 100 cached ones."""
    runner.logits([RowInput(0, 0, [1] * 100)])
    times = []
    for _ in range(_REPETITIONS):
        began_s = time.perf_counter()
        runner.logits([RowInput(0, 100, [1] * tokens)])
        times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times)


def _acceptance(
    target: LlamaForCausalLM, spec: ModelSpec, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """Return the share of the target's tokens that the model would draft, and tokens per step at a constant γ."""
    drafter = cast(LlamaForCausalLM, load_model(spec))
    acceptance: dict[str, float] = {}
    for temperature in (0.0, 1.0):
        result = measure(target, drafter, prompts, temperature=temperature, new_tokens=new_tokens)
        acceptance[f"acceptance_at_{temperature:.0f}"] = round(result.coupled, 3)
        acceptance[f"tokens_per_step_at_{temperature:.0f}"] = round(result.coupled_tokens_per_step[_DRAFT_LENGTH], 2)
    return acceptance


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inflated", action="store_true", help="measure the inflated target")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that the target writes after each prompt")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
