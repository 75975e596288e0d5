"""vLLM on the CPU, in an environment of its own (`make bench-peers`): its worker, and plain decoding."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.contestant import Contestant, Workload
from benchmarks.processes import Program, foreign_environment
from engine.loading.checkpoint import ModelSpec

_WORKER = Path(__file__).with_name("vllm_worker.py")


class VllmWorker(Program):
    """`vllm_worker.py` in vLLM's environment: it answers each line of JSON with one."""

    def __init__(self, python: Path, *, log: Path, environment: Mapping[str, str]) -> None:
        super().__init__([str(python), "-P", str(_WORKER)], log=log, environment=environment, pipes=True)

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


def vllm_environment(threads: int) -> dict[str, str]:
    """Return an environment that binds vLLM to `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return foreign_environment() | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }


class Vllm(Contestant):
    """Plain decoding in a worker's process, which ends with the `with` block."""

    def __init__(self, python: Path, model: ModelSpec, *, threads: int, log: Path) -> None:
        """python: the environment's interpreter. model: path, dtype, and slots as the maximum of streams."""
        self._setup = {"model": str(Path(model.path).resolve()), "dtype": model.dtype, "streams": model.slots}
        self._worker = VllmWorker(python, log=log, environment=vllm_environment(threads))
        super().__init__("vLLM", "plain", "vllm", [self._worker])

    def __enter__(self) -> "Vllm":
        """Load, compile, and pause."""
        self._worker.ask(self._setup)
        self._worker.pause()
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(*error)

    def run(self, workload: Workload) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompts, _ in workload.batches():
            question = {"prompts": prompts, "max_tokens": workload.new_tokens, "temperature": workload.temperature}
            answers += self._worker.ask(question)["answers"]
        return answers
