"""Consort as a contestant: requests to a coordinator, whose replicas run in any process."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Endpoint, Request, Statistics
from actors.replica import in_process
from benchmarks.peers.contestant import Activity, Contestant
from benchmarks.peers.hosts import Host
from benchmarks.peers.replica import MeasuredReplica, Sweep, Times
from benchmarks.peers.workload import Workload

_SETTLING_S = 0.05  # until replicas know that a request has ended


class Ours(Contestant):
    """One endpoint of a running Consort."""

    def __init__(
        self,
        kind: Literal["plain", "fixed", "adaptive", "colocated"],
        endpoint: Endpoint,
        coordinator: Coordinator,
        check: Callable[[], None],
        target: Host[MeasuredReplica],
        drafter: Host[MeasuredReplica] | None,
        *,
        group: str = "Consort",
    ) -> None:
        """
        endpoint: its draft length is γ, or the maximum of an adaptive γ.
        check: raises if the coordinator has ended.
        """
        most = endpoint.draft_length
        how = {"plain": "plain", "fixed": f"γ = {most}"}.get(kind, f"adaptive, γ ≤ {most}")
        hosts = [target] if drafter is None else [target, drafter]
        super().__init__(group, how, kind, hosts, draft_length=most if kind == "fixed" else None)
        self.target, self.drafter, self.most = target, drafter, most
        self._endpoint, self._coordinator, self._check = endpoint, coordinator, check
        self._statistics = Statistics()

    def run(self, workload: Workload) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompts, params in workload.batches():
            pairs = zip(prompts, params, strict=True)
            requests = [Request(self._endpoint, prompt, prompt_params) for prompt, prompt_params in pairs]
            for deltas in in_process.generate(self._coordinator, requests, self._check_all):
                answers.append([token for delta in deltas for token in delta.token_ids])
                self._statistics += deltas[-1].statistics
        return answers

    def _check_all(self) -> None:
        """Raise UnavailableError if a loop has ended. Otherwise its requests would wait for their timeout."""
        self._check()
        self.target.call(MeasuredReplica.check)
        if self.drafter is not None:
            self.drafter.call(MeasuredReplica.check)

    def activity(self) -> Activity:
        time.sleep(_SETTLING_S)
        statistics, self._statistics = self._statistics, Statistics()
        for host in (self.target, self.drafter):
            if host is not None:
                host.call(MeasuredReplica.clear_cache)
        target = self.target.call(MeasuredReplica.take_times)
        if self.drafter is None:
            return Activity(statistics, target)
        return Activity(statistics, target, self.drafter.call(MeasuredReplica.take_times))


def measure_times(plain: Ours, drafting: Ours, *, streams: int, draft_lengths: Sequence[int]) -> Times:
    """Measure the step times of idle contestants' replicas, one replica at a time."""
    assert drafting.drafter is not None
    sizes = sorted({1, *(γ + 1 for γ in draft_lengths)})
    return Times(
        plain=_sweep(plain.target, rows=streams, sizes=sizes),
        target=_sweep(drafting.target, rows=streams, sizes=sizes),
        draft_step_s=_sweep(drafting.drafter, rows=streams, sizes=[1])[1],
    )


def _sweep(replica: Host[MeasuredReplica], *, rows: int, sizes: Sequence[int]) -> Sweep:
    replica.resume()
    try:
        return replica.call(MeasuredReplica.sweep, rows=rows, sizes=sizes)
    finally:
        replica.pause()


def swept_lengths(fixed: Sequence[int], most: int) -> list[int]:
    """Return the draft lengths whose steps are timed: the fixed ones, and some up to `most` for an adaptive γ."""
    return sorted({*fixed, *(γ for γ in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if γ < most), most})
