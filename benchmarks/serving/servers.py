"""Servers (Consort on this process's own Ray or as `consort serve`, vLLM's), and load from `vllm bench serve`."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import yaml

from benchmarks.peers.vllm import VllmWorker, vllm_environment
from benchmarks.processes import Server, free_port
from cli.serving.cluster import serving
from decoding.errors import ConsortError
from deployments.client import Client
from deployments.configuration.config import ServerConfig
from evaluation.prompts import read_prompts

MODEL = "bench"  # the model's name on every server
_START_S = 300.0  # vLLM compiles the model before it answers


@contextmanager
def our_server(config: ServerConfig) -> Iterator[str]:
    """Start Consort and yield its URL. The server ends with the block."""
    with serving(config, address=None, watch=lambda progress: None):
        yield config.http.url


class ConsortServer(Server):
    """`consort serve` in a process of its own, on a free port."""

    def __init__(self, config: ServerConfig, *, folder: Path) -> None:
        """folder: for the configuration file and the log."""
        config.http.port = free_port()
        self.url = config.http.url
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "http-server.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
        command = [sys.executable, "-m", "cli", "serve", str(file)]
        super().__init__(command, ready=self._has_all, start_s=_START_S, log=folder / "http-server.log")

    def _has_all(self) -> bool:
        try:
            status = Client(self.url).get("/v1/status").document
        except ConsortError:
            return False
        return bool(status.get("status") == "ready" and len(status["replicas"]) > 1)

    def read_metrics(self) -> str:
        """Return the text of /metrics."""
        with urlopen(f"{self.url}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text


class VllmServer(Server):
    """vLLM's OpenAI server over the same checkpoint."""

    def __init__(self, python: Path, model: Path, *, dtype: str, slots: int, threads: int | None, log: Path) -> None:
        """threads: number of cores to bind vLLM's workers to; None: vLLM's default."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "--model": model.resolve(),
            "--served-model-name": MODEL,
            "--dtype": dtype,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-model-len": 1024,
            "--max-num-seqs": slots,
        }
        arguments = [str(part) for pair in options.items() for part in pair]
        super().__init__(
            [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments],
            ready=partial(_is_healthy, self.url),
            start_s=_START_S,
            log=log,
            environment=vllm_environment(threads),
        )


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


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
