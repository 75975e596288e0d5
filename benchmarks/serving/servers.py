"""Servers on this machine: `consort serve`, and those of its peers."""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import yaml

from benchmarks.peers.vllm import vllm_environment
from benchmarks.processes import Server, foreign_environment, free_port
from decoding.errors import ConsortError
from deployments.client import Client
from deployments.configuration.config import ServerConfig
from engine.loading.gguf.files import settings_folder, weights_folder
from engine.loading.host import compute_environment

_START_S = 300.0  # vLLM compiles the model before it answers
CONTEXT = 1024  # tokens of a request to a peer


class ConsortServer(Server):
    """`consort serve` in a process of its own, on a free port."""

    def __init__(self, config: ServerConfig, *, folder: Path) -> None:
        """folder: for the configuration file and the log."""
        config.http.port = free_port()
        self.url = config.http.url
        self._replicas = sum(model.replicas for model in config.models.values() if model.colocated_with is None)
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
        return bool(status.get("status") == "ready" and len(status["replicas"]) >= self._replicas)

    def read_metrics(self) -> str:
        """Return the text of /metrics."""
        with urlopen(f"{self.url}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text


class PeerServer(Server):
    """Another project's OpenAI server."""

    def __init__(self, command: list[object], *, log: Path, environment: Mapping[str, str]) -> None:
        """command: without the address."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            [str(part) for part in (*command, "--host", "127.0.0.1", "--port", port)],
            ready=partial(_is_healthy, self.url),
            start_s=_START_S,
            log=log,
            environment=environment,
        )


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def llama_server(program: Path, model: str, *, slots: int, threads: int, drafts: bool, log: Path) -> PeerServer:
    """Return llama.cpp's server over a .gguf file. drafts: from n-grams of the text, as its documentation has them."""
    ngrams = ["--spec-type", "ngram-simple", "--spec-draft-n-max", 64] if drafts else []
    sizes = ["--parallel", slots, "--ctx-size", CONTEXT * slots, "--threads", threads]
    return PeerServer([program, "--model", model, *sizes, *ngrams], log=log, environment=foreign_environment())


def vllm_server(
    python: Path, model: str, dtype: str, *, name: str, slots: int, threads: int, drafts: object, log: Path
) -> PeerServer:
    """Return vLLM's server over a checkpoint; of a .gguf file, over its weights unpacked.

    Args:
        name: of the model in requests.
        threads: number of cores to bind its workers to.
        drafts: its `--speculative-config`; None: without drafts.
    """
    options: dict[str, object] = {
        "--model": Path(weights_folder(model, dtype, unpacked=True)).resolve(),
        "--tokenizer": Path(settings_folder(model)).resolve(),
        "--served-model-name": name,
        "--dtype": dtype,
        "--max-model-len": CONTEXT,
        "--max-num-seqs": slots,
    }
    if drafts is not None:
        options["--speculative-config"] = json.dumps(drafts)
    command: list[object] = [python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return PeerServer([*command, *sum(options.items(), ())], log=log, environment=vllm_environment(threads))


def huggingface_server(model: str, dtype: str, *, threads: int, lookup: int, log: Path) -> PeerServer:
    """Return Hugging Face's `generate` over a checkpoint, as in `vllm_server`. lookup: tokens of a draft; 0: none."""
    options: dict[str, object] = {
        "--model": Path(weights_folder(model, dtype, unpacked=True)).resolve(),
        "--tokenizer": Path(settings_folder(model)).resolve(),
        "--dtype": dtype,
        "--threads": threads,
        "--lookup": lookup,
    }
    command: list[object] = [sys.executable, "-m", "benchmarks.serving.huggingface"]
    return PeerServer(
        [*command, *sum(options.items(), ())], log=log, environment=os.environ | compute_environment(threads)
    )
