"""A drafter's chain on the `meta` device: what it costs, and how many graphs are captured at the start."""

from statistics import median

from actors.drafter.chain import ChainStart, DraftChain
from benchmarks.step_budget.host_clock import HostClock
from benchmarks.step_budget.metered_runner import MeteredRunner
from benchmarks.step_budget.stage import WARM_UPS, Load
from benchmarks.step_budget.traffic import Traffic
from engine.model.ragged_batch import RowInput


class ChainStage:
    """A drafter whose rows all want a chain."""

    def __init__(self, metered: MeteredRunner, load: Load) -> None:
        """load: a row's width is the number of its draft tokens and one more."""
        self._metered, self._length = metered, load.width - 1
        self._starts = [
            ChainStart(RowInput(slot, load.context, [1]), load.params, load.context + 1) for slot in range(load.rows)
        ]
        self._chain = DraftChain(metered.runner)
        self._chain.warm_up()

    def traffic(self) -> Traffic:
        """Run a chain; return what it costs on the device."""
        capture = self._metered.capture
        self._chain.run(self._starts, self._length)  # captured now, if it was not at the start
        with self._metered.metered() as meter:
            capture.traffic = meter.traffic
            self._chain.run(self._starts, self._length)
            capture.traffic = None
        return meter.traffic

    def host_s(self, chains: int) -> float:
        """Run some chains; return the median of the host's time for one, in seconds of a core."""
        for _ in range(WARM_UPS):
            self._host_s()
        return median(self._host_s() for _ in range(chains))

    def _host_s(self) -> float:
        with HostClock() as clock:
            self._chain.run(self._starts, self._length)
        return clock.seconds
