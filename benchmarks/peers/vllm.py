"""vLLM on the CPU, in a child process with its own environment (`make bench-peers`): plain decoding."""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.workload import Workload
from engine.loading.checkpoint import ModelSpec

_WORKER = Path(__file__).with_name("vllm_worker.py")
_NOT_INHERITED = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV")  # prefixes of environment variables
_GRACE_S = 20.0


class Vllm:
    """The process group of one engine, which ends with the `with` block."""

    def __init__(self, python: Path, model: ModelSpec, *, threads: int, log: Path) -> None:
        """python: the environment's interpreter. model: path, dtype, and slots as the maximum of streams."""
        self._setup = {"model": str(Path(model.path).resolve()), "dtype": model.dtype, "streams": model.slots}
        self._log_path = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
                env=_environment(threads),
            )
        self.version = ""

    def __enter__(self) -> "Vllm":
        """Load and compile, and wait until the engine is ready."""
        self.version = self._ask(self._setup)["version"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self.resume()
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def generate(self, workload: Workload) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompts, _ in workload.batches():
            question = {"prompts": prompts, "max_tokens": workload.new_tokens, "temperature": workload.temperature}
            answers += self._ask(question)["answers"]
        return answers

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self._process.wait()}; see {self._log_path}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class VllmContestant(Contestant):
    """Plain decoding."""

    def __init__(self, engine: Vllm) -> None:
        super().__init__("vLLM", "plain", "vllm", [engine])
        self._engine = engine

    def run(self, workload: Workload) -> list[list[int]]:
        return self._engine.generate(workload)


def _environment(threads: int) -> dict[str, str]:
    """Return an environment that binds vLLM's workers to `threads` cores, and leaves other settings to vLLM."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
