"""The load of a replica: its loop's report and times, and the requests that coordinators hold back."""

import time
from collections.abc import Callable
from dataclasses import replace

from actors.loops.thread import LoopTimes
from actors.wire.messages import Report
from deployments.scaling.policy import ReplicaLoad

_SILENCE_S = 5.0  # after which a coordinator's queue no longer counts; coordinators report every second


class LoadMeter:
    """Measures one replica. Calls may come from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._last, self._clock = LoopTimes(), clock
        self._queues: dict[str, tuple[int, float]] = {}  # by coordinator: requests, and the time of the report

    def set_queued(self, coordinator: str, queued: int) -> None:
        """Note how many requests a coordinator holds back for the model, on whichever replica they will run."""
        self._queues[coordinator] = queued, self._clock()

    def count_coordinators(self) -> int:
        """Return how many coordinators are alive."""
        return len(self._live_queues())

    def measure(self, report: Report, times: LoopTimes) -> ReplicaLoad:
        """Return the load since the last call. times: the loop's, since it started."""
        now = replace(times)  # a copy: the loop goes on counting
        since, self._last = now - self._last, now
        computed_s = since.step_s + since.prefill_s + since.drafted_s
        active_s = computed_s + since.waited_s
        return ReplicaLoad(
            rows=report.active,
            waiting=report.waiting,
            slots=report.capacity,
            drafting=float(report.drafting),
            lag=since.waited_s / active_s if active_s else 0.0,
            busy=computed_s / (active_s + since.idle_s) if computed_s else 0.0,
            queued=float(sum(self._live_queues())),
        )

    def _live_queues(self) -> list[int]:
        """Return the requests that each live coordinator holds back."""
        since_s = self._clock() - _SILENCE_S
        self._queues = {name: queue for name, queue in list(self._queues.items()) if queue[1] >= since_s}
        return [queued for queued, _ in self._queues.values()]
