"""How much a replica has to do: its loop's report, where the loop's time went, and what coordinators hold back."""

import time
from collections.abc import Callable
from dataclasses import replace

from actors.loops.thread import LoopTimes
from actors.wire.messages import Report
from deployments.scaling.policy import ReplicaLoad

_SILENCE_S = 5.0  # after which a coordinator's queue no longer counts; coordinators tell every second


class LoadMeter:
    """Measures one replica. Calls may come from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._seen, self._clock = LoopTimes(), clock
        self._queues: dict[str, tuple[int, float]] = {}  # by coordinator: requests, and when it told

    def hear(self, coordinator: str, queued: int) -> None:
        """A coordinator holds back so many requests for the model, whichever replica they will go to."""
        self._queues[coordinator] = queued, self._clock()

    def measure(self, report: Report, times: LoopTimes) -> ReplicaLoad:
        """The load now; times: of the loop, since it started."""
        now = replace(times)  # the loop goes on counting
        since, self._seen = now - self._seen, now
        computed_s = since.step_s + since.prefill_s + since.drafted_s
        at_work_s = computed_s + since.waited_s
        return ReplicaLoad(
            rows=report.active,
            waiting=report.waiting,
            slots=report.slots,
            drafting=float(report.drafting),
            lag=since.waited_s / at_work_s if at_work_s else 0.0,
            busy=computed_s / (at_work_s + since.idle_s) if computed_s else 0.0,
            queued=self._queued(),
        )

    def _queued(self) -> float:
        """What all live coordinators together hold back."""
        since_s = self._clock() - _SILENCE_S
        self._queues = {name: told for name, told in list(self._queues.items()) if told[1] >= since_s}
        return float(sum(queued for queued, _ in self._queues.values()))
