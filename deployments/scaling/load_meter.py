"""How much a replica has to do: from its loop's report, and from where the loop's time went since the last look."""

from dataclasses import replace

from actors.loop import LoopTimes
from actors.messages import Report
from deployments.scaling.policy import ReplicaLoad


class LoadMeter:
    """Of one replica."""

    def __init__(self) -> None:
        self._seen = LoopTimes()

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
        )
