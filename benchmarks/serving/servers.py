"""The servers under load: Consort on this process's own Ray, and vLLM in a child process."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from actors.wire.messages import ReplicaAddress
from benchmarks.serving.server_process import ServerProcess
from cli.serving.cluster import serving
from deployments.configuration.config import ServerConfig, parse_config

MODEL = "bench"  # the model's name on every server
_START_S = 300.0  # vLLM compiles the model before it answers
_NOT_INHERITED = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV", "RAY_")  # prefixes of variables


def make_config(
    target: Path,
    drafter: Path | None,
    *,
    heads: Path | None = None,
    dtype: str,
    drafter_dtype: str,
    target_threads: int,
    drafter_threads: int,
    slots: int,
    draft_length: int,
    colocated: bool,
    ngram: bool = False,
) -> ServerConfig:
    """Build the server's configuration.

    heads: an EAGLE-3 head, in the target's process. colocated: it runs the drafter, too, with the threads of both.
    ngram: the text itself drafts, too.
    """
    common = {"device": "cpu", "slots": slots}
    threads = target_threads + drafter_threads * colocated
    models: dict[str, object] = {"target": {"path": str(target), "dtype": dtype, "threads": threads, **common}}
    endpoint: dict[str, object] = {"target": "target", "draft_length": draft_length}
    if drafter is not None:
        drafter_options = {"colocated_with": "target"} if colocated else {"threads": drafter_threads, "slots": slots}
        models["drafter"] = {"path": str(drafter), "dtype": drafter_dtype, "device": "cpu", **drafter_options}
        endpoint["drafter"] = "drafter"
    if heads is not None:
        endpoint["heads"] = {"path": str(heads), "kind": "eagle3"}
    if ngram:
        endpoint["ngram"] = {}
    document = {"models": models, "endpoints": {MODEL: endpoint}, "http": {"port": free_port()}}
    return parse_config(document, folder=Path.cwd())


@contextmanager
def our_server(config: ServerConfig) -> Iterator[str]:
    """Start Consort and yield its URL. The server ends with the block."""
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
        yield config.http.url


def replica_addresses(config: ServerConfig) -> list[ReplicaAddress]:
    """Return the addresses of the running server's replicas."""
    from ray import serve

    from deployments.replicas.environment import APP_NAME, deployment_name

    handles = (serve.get_deployment_handle(deployment_name(*pair), APP_NAME) for pair in config.roles().items())
    return [answer.address for handle in handles for answer in handle.broadcast("address").results(timeout_s=10)]


class VllmServer(ServerProcess):
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
            ready=partial(_healthy, self.url),
            start_s=_START_S,
            log=log,
            environment=_environment(threads),
        )


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _environment(threads: int | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "auto" if threads is None else ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
