"""The servers under load: Consort on this process's own Ray or as `consort serve`, and vLLM's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import yaml

from benchmarks.processes import Server, free_port, vllm_environment
from cli.serving.cluster import serving
from decoding.errors import ConsortError
from deployments.client import Client
from deployments.configuration.config import ServerConfig

MODEL = "bench"  # the model's name on every server
_START_S = 300.0  # vLLM compiles the model before it answers


@contextmanager
def our_server(config: ServerConfig) -> Iterator[str]:
    """Start Consort and yield its URL. The server ends with the block."""
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
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
