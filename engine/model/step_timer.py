"""Times a step: on a GPU what its kernels took, elsewhere until the host has the results. Knows nothing of models."""

import time

import torch


class StepTimer:
    """Started before a step's first kernel is launched."""

    def __init__(self, device: torch.device) -> None:
        self._began_s, self._device = time.perf_counter(), device
        self._start = self._event() if device.type == "cuda" else None
        self._end: torch.cuda.Event | None = None

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """Note that all kernels have been launched."""
        if self._start is not None:
            self._end = self._event()

    def seconds(self) -> float:
        """Return the step's time once the host has its results; on a GPU that which passed before `stop`."""
        if self._start is None or self._end is None:
            return time.perf_counter() - self._began_s
        self._end.synchronize()  # at once, except after a step without results for the host
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1e3
