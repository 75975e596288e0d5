"""Consort itself: a coordinator in this process, a target and a drafter in processes of their own."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from actors import client
from actors.coordinator import Coordinator
from actors.loading import ModelSpec
from actors.loop import LoopThread, LoopTimes
from actors.request import Endpoint, Request, Statistics
from actors.zmq_link import CoordinatorZmqLink
from benchmarks.processes import ReplicaProcess
from benchmarks.workload import Workload


class Ours:
    """One endpoint of a running Consort, with speculation on or off."""

    def __init__(
        self,
        coordinator: Coordinator,
        check: Callable[[], None],
        target: ReplicaProcess,
        drafter: ReplicaProcess,
        *,
        draft_length: int,
    ) -> None:
        """draft_length: γ; 0 is plain decoding."""
        self.name = f"Consort, γ = {draft_length}" if draft_length else "Consort, plain"
        self.draft_length = draft_length
        self.forget()
        self._coordinator, self._check = coordinator, check
        self._target, self._drafter = target, drafter
        self._endpoint = Endpoint("bench", target.address.model, "drafter", draft_length, decode=lambda tokens: "")

    def forget(self) -> None:
        """Begin to count anew, after a warm-up."""
        self.statistics = Statistics()
        self.target_times, self.drafter_times = LoopTimes(), LoopTimes()

    def run(self, workload: Workload) -> list[list[int]]:
        before = self._target.times(), self._drafter.times()
        answers = []
        for index, prompt in enumerate(workload.prompts):
            request = Request(self._endpoint, prompt, workload.params(index))
            deltas = client.generate(self._coordinator, [request], self._check)[0]
            answers.append([token for delta in deltas for token in delta.tokens])
            self.statistics += deltas[-1].statistics
        self.target_times += self._target.times() - before[0]
        self.drafter_times += self._drafter.times() - before[1]
        return answers


@contextlib.contextmanager
def start(
    target: Path,
    drafter: Path,
    *,
    dtype: str,
    plain_threads: int,
    target_threads: int,
    drafter_threads: int,
    draft_lengths: list[int],
) -> Iterator[list[Ours]]:
    """Contestants: plain decoding by a target of its own, and one per draft length; these share target and drafter."""
    specs = (
        ModelSpec(name="plain", path=str(target), dtype=dtype, slots=8, threads=plain_threads),
        ModelSpec(name="target", path=str(target), dtype=dtype, slots=8, threads=target_threads),
        ModelSpec(name="drafter", path=str(drafter), dtype=dtype, slots=8, threads=drafter_threads),
    )
    with (
        ReplicaProcess("target", specs[0]) as plain_process,
        ReplicaProcess("target", specs[1]) as target_process,
        ReplicaProcess("drafter", specs[2]) as drafter_process,
    ):
        link = CoordinatorZmqLink("bench")
        coordinator = Coordinator(link)
        thread = LoopThread("coordinator", coordinator.turn, link.wake)
        thread.start()
        coordinator.set_replicas([plain_process.address, target_process.address, drafter_process.address])
        try:
            yield [
                Ours(coordinator, thread.check, plain_process, drafter_process, draft_length=0),
                *(
                    Ours(coordinator, thread.check, target_process, drafter_process, draft_length=draft_length)
                    for draft_length in draft_lengths
                ),
            ]
        finally:
            thread.stop()
            link.close()
