"""vLLM on the CPU, in an environment of its own (`make bench-peers`): plain decoding."""

from pathlib import Path

from benchmarks.peers.contestant import Contestant, Workload
from benchmarks.processes import VllmWorker, vllm_environment
from engine.loading.checkpoint import ModelSpec


class Vllm(Contestant):
    """Plain decoding in a worker's process, which ends with the `with` block."""

    def __init__(self, python: Path, model: ModelSpec, *, threads: int, log: Path) -> None:
        """python: the environment's interpreter. model: path, dtype, and slots as the maximum of streams."""
        self._setup = {"model": str(Path(model.path).resolve()), "dtype": model.dtype, "streams": model.slots}
        self._worker = VllmWorker(python, "engine", log=log, environment=vllm_environment(threads))
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
