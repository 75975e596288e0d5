"""Stands for CUDA graphs: a capture runs the call once and notes what it costs, a replay costs that again."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from benchmarks.step_budget.traffic import Meter, Traffic
from engine.model.cuda import Replay


class FakeCapture:
    """Makes replays without kernels."""

    def __init__(self, make_meter: Callable[[], AbstractContextManager[Meter]]) -> None:
        self.captured = 0
        self.capturing = False
        self.traffic: Traffic | None = None  # where replays are counted
        self.on_replay: Callable[[], None] = lambda: None
        self._make_meter = make_meter

    def __call__(self, run: Replay) -> Replay:
        """Capture a call, as `GraphRecorder` asks."""
        self.captured += 1
        self.capturing = True
        with self._make_meter() as meter:
            output = run()
        self.capturing = False

        def replay() -> Tensor:
            if self.traffic is not None:
                self.traffic.add(meter.traffic)
            self.on_replay()
            return output

        return replay
