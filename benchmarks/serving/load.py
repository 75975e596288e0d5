"""Load over HTTP from an independent generator, `vllm bench serve`, in its own environment."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from training.heldout import read_prompts

_GENERATOR = Path(__file__).parents[1] / "peers" / "vllm_load.py"
_GRACE_S = 20.0
_PERCENTILES = "50,99"


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


class LoadGenerator:
    """The generator's process, which ends with the `with` block."""

    def __init__(self, python: Path, *, log: Path) -> None:
        """python: of an environment with vLLM. log: file for the generator's output."""
        self._log_path = log
        self._run = int(time.time()) % 10**5 * 1000  # servers may know the prompts of other runs
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", str(_GENERATOR)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            )

    def __enter__(self) -> "LoadGenerator":
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, url: str, model: str, load: Load, extra_body: Mapping[str, object]) -> LoadResult:
        """Send the load to the server at `url`. Raises RuntimeError if an answer is missing or too short.

        Each run's prompts begin with its number, so that no server finds them in its cache.
        """
        assert self._process.stdin is not None
        self._run += 1
        prompts = self._log_path.with_suffix(".jsonl")
        numbered = [json.dumps({"prompt": f"{self._run} {prompt}"}) for prompt in read_prompts(load.prompts)]
        prompts.write_text("\n".join(numbered) + "\n", encoding="utf-8")
        arguments = _arguments(url, model, replace(load, prompts=prompts), extra_body)
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        result = self._read()
        expected = load.requests * load.new_tokens
        if result["failed"] or result["total_output_tokens"] != expected:
            reasons = {error for error in result["errors"] if error}
            raise RuntimeError(
                f"{url}: {result['failed']} of {load.requests} requests failed, {result['total_output_tokens']} of "
                f"{expected} tokens came; {reasons or f'see {self._log_path}'}"
            )
        return _measured(result, load.concurrency)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the load generator ended with {self._process.wait()}; see {self._log_path}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _arguments(url: str, model: str, load: Load, extra_body: Mapping[str, object]) -> list[str]:
    """Return the arguments of `vllm bench serve`."""
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": load.tokenizer.resolve(),
        "--dataset-name": "custom",
        "--dataset-path": load.prompts.resolve(),
        "--custom-output-len": load.new_tokens,
        "--num-prompts": load.requests,
        "--max-concurrency": load.concurrency,
        "--temperature": load.temperature,
        "--seed": load.seed,
        "--percentile-metrics": "ttft,tpot,itl",
        "--metric-percentiles": _PERCENTILES,
        "--ready-check-timeout-sec": 0,
        "--extra-body": json.dumps(extra_body),
    }
    flags = ["--skip-chat-template", "--ignore-eos", "--disable-tqdm", "--save-detailed"]
    return [*(str(part) for pair in options.items() for part in pair), *flags]


def _measured(result: Mapping[str, Any], concurrency: int) -> LoadResult:
    events = sum(1 + len(gaps) for gaps in result["itls"])
    return LoadResult(
        concurrency,
        tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
        **{f"{name}_p{p}_ms": result[f"p{p}_{name}_ms"] for name in ("ttft", "tpot", "itl") for p in (50, 99)},
        tokens_per_event=result["total_output_tokens"] / events,
    )
