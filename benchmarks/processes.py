"""Programs in process groups of their own: servers, and workers that speak JSON lines. They end with a `with` block."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.hosts import ProcessGroup

_WORKER = Path(__file__).parent / "peers" / "vllm_worker.py"
_NOT_INHERITED = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV", "RAY_")  # prefixes of variables
_POLL_S = 0.2
_GRACE_S = 60.0


class _Program(ProcessGroup):
    """A program whose messages go to a log."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None, pipes: bool
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else None,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                text=True,
                process_group=0,
                env=environment and dict(environment),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.resume()
            self._end()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()

    def _end(self) -> None:
        self._process.terminate()


class Server(_Program):
    """A server that starts at once. `with` waits until it answers."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        start_s: float,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        ready: returns whether the server answers.
        start_s: maximum seconds until it does.
        """
        super().__init__(command, log=log, environment=environment, pipes=False)
        self._ready, self._start_s = ready, start_s

    def __enter__(self) -> Self:
        """Raises RuntimeError if the server ends or takes too long."""
        deadline_s = time.monotonic() + self._start_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.__exit__()
                raise RuntimeError(f"the server did not come up; see {self._log}")
            time.sleep(_POLL_S)
        return self


class VllmWorker(_Program):
    """`peers/vllm_worker.py` in vLLM's environment: it answers each line of JSON with one."""

    def __init__(self, python: Path, role: str, *, log: Path, environment: Mapping[str, str]) -> None:
        """role: `engine` or `load`."""
        super().__init__([str(python), "-P", str(_WORKER), role], log=log, environment=environment, pipes=True)

    def __enter__(self) -> Self:
        return self

    def ask(self, question: object) -> dict[str, Any]:
        """Raises RuntimeError if the worker has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self._process.wait()}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def vllm_environment(threads: int | None) -> dict[str, str]:
    """Return an environment that binds vLLM to `threads` cores; None: to as many as it chooses."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "auto" if threads is None else ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
