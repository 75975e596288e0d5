"""Load over HTTP from an independent generator, `vllm bench serve`, in vLLM's environment."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import VllmWorker, vllm_environment
from evaluation.prompts import read_prompts


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one run, and their concurrency."""

    prompts: Path  # one {"prompt": …} per line
    tokenizer: Path
    requests: int
    concurrency: int
    new_tokens: int  # of every answer: no answer ends at EOS
    temperature: float
    seed: int  # of the choice and order of prompts


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one run, times in milliseconds.

    `itl` is the time between events: with speculation an event has all tokens of a step. `tpot` is the time per token,
    without the first one.
    """

    concurrency: int
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_event: float


class LoadGenerator(VllmWorker):
    """The generator's process, which stays loaded between runs and ends with the `with` block."""

    def __init__(self, python: Path, *, log: Path) -> None:
        """python: of an environment with vLLM. log: file for the generator's output."""
        super().__init__(python, "load", log=log, environment=vllm_environment(None))
        self._prompts = log.with_suffix(".jsonl")
        self._run = int(time.time()) % 10**5 * 1000  # servers may know the prompts of other runs

    def run(self, url: str, model: str, load: Load, extra_body: Mapping[str, object]) -> LoadResult:
        """Send the load to the server at `url`. Raises RuntimeError if an answer is missing or too short.

        Each run's prompts begin with its number, so that no server finds them in its cache.
        """
        self._run += 1
        numbered = [json.dumps({"prompt": f"{self._run} {prompt}"}) for prompt in read_prompts(load.prompts)]
        self._prompts.write_text("\n".join(numbered) + "\n", encoding="utf-8")
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": model,
            "--tokenizer": load.tokenizer.resolve(),
            "--dataset-name": "custom",
            "--dataset-path": self._prompts.resolve(),
            "--custom-output-len": load.new_tokens,
            "--num-prompts": load.requests,
            "--max-concurrency": load.concurrency,
            "--temperature": load.temperature,
            "--seed": load.seed,
            "--percentile-metrics": "ttft,tpot,itl",
            "--metric-percentiles": "50,99",
            "--ready-check-timeout-sec": 0,
            "--extra-body": json.dumps(extra_body),
        }
        flags = ["--skip-chat-template", "--ignore-eos", "--disable-tqdm", "--save-detailed"]
        result = self.ask([*(str(part) for pair in options.items() for part in pair), *flags])
        expected = load.requests * load.new_tokens
        if result["failed"] or result["total_output_tokens"] != expected:
            reasons = {error for error in result["errors"] if error}
            raise RuntimeError(
                f"{url}: {result['failed']} of {load.requests} requests failed, {result['total_output_tokens']} of "
                f"{expected} tokens came; {reasons or f'see {self._log}'}"
            )
        return _measured(result, load.concurrency)


def _measured(result: Mapping[str, Any], concurrency: int) -> LoadResult:
    events = sum(1 + len(gaps) for gaps in result["itls"])
    return LoadResult(
        concurrency,
        tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
        **{f"{name}_p{p}_ms": result[f"p{p}_{name}_ms"] for name in ("ttft", "tpot", "itl") for p in (50, 99)},
        tokens_per_event=result["total_output_tokens"] / events,
    )
