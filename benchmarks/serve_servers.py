"""The servers under load: Consort's, started in this process's own Ray, and vLLM's, as a child."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import urlopen

from actors.addresses import ReplicaAddress
from deployments.cluster import serving
from deployments.configuration.config import ServerConfig, parse_config

MODEL = "bench"  # what every server calls the model
_POLL_S = 0.2
_START_S = 300.0  # vLLM compiles the model before it answers
_GRACE_S = 20.0
_THEIR_OWN_CHOICE = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV", "RAY_")  # variables not handed on


def make_config(
    target: Path,
    drafter: Path,
    *,
    dtype: str,
    drafter_dtype: str,
    target_threads: int,
    drafter_threads: int,
    slots: int,
    draft_length: int,
    inside: bool,
) -> ServerConfig:
    """What `consort serve` would read from a file, with a slot for every stream. inside: the drafter is, in the target.

    Then the target has the drafter's threads, too.
    """
    common = {"device": "cpu", "slots": slots}
    threads = target_threads + drafter_threads * inside
    of_drafter = {"inside": "target"} if inside else {"threads": drafter_threads, "slots": slots}
    models = {
        "target": {"path": str(target), "dtype": dtype, "threads": threads, **common},
        "drafter": {"path": str(drafter), "dtype": drafter_dtype, "device": "cpu", **of_drafter},
    }
    endpoint = {"target": "target", "drafter": "drafter", "draft_length": draft_length}
    document = {"models": models, "endpoints": {MODEL: endpoint}, "http": {"port": free_port()}}
    return parse_config(document, folder=Path.cwd())


@contextmanager
def our_server(config: ServerConfig) -> Iterator[str]:
    """Our server's URL; the server ends with the block."""
    with serving(config, address=None, verbose=False, watch=lambda progress: None):
        yield config.http.url


def replica_addresses(config: ServerConfig) -> list[ReplicaAddress]:
    """Where a coordinator of this process reaches the running server's own replicas."""
    from ray import serve

    from deployments.app import APP_NAME, deployment_name

    handles = (serve.get_deployment_handle(deployment_name(*pair), APP_NAME) for pair in config.roles().items())
    return [address for handle in handles for address in handle.broadcast("address").results(timeout_s=10)]


class VllmServer:
    """vLLM's OpenAI server over the same checkpoint, in a process group of its own that ends with the `with` block."""

    def __init__(self, python: Path, model: Path, *, dtype: str, slots: int, threads: int | None, log: Path) -> None:
        """Begins to load at once. threads: cores to bind its workers to; None: its own choice."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log_path = log
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
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                # Prompts come back in every repetition, and nobody else may remember them either.
                [
                    str(python),
                    "-P",
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    *arguments,
                    "--no-enable-prefix-caching",
                ],
                stdout=output,
                stderr=output,
                process_group=0,
                env=_environment(threads),
            )

    def __enter__(self) -> "VllmServer":
        """Wait until it answers; raises RuntimeError if it ends before."""
        deadline_s = time.monotonic() + _START_S
        while not _healthy(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._stop()
                raise RuntimeError(f"vLLM's server did not come up; see {self._log_path}")
            time.sleep(_POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def pause(self) -> None:
        """Compute nothing, spin on nothing and poll nothing until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _stop(self) -> None:
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def free_port() -> int:
    """A port on loopback that nothing listens on."""
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
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_THEIR_OWN_CHOICE)}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "auto" if threads is None else ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
