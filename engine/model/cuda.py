"""A loop's stream of kernels on a GPU, its time, and calls recorded as CUDA graphs."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_WARM_UPS = 2  # calls before a recording, in which libraries allocate what they need
_one_at_a_time = threading.Lock()  # torch records one graph at a time in a process; loops are threads

Replay = Callable[[], Tensor]
_Size = TypeVar("_Size")


def use_own_stream(device: torch.device) -> None:
    """Let this thread's kernels run beside those of other threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # this stream must see the weights that were loaded
        torch.cuda.set_stream(torch.cuda.Stream(device))


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


class GraphRecorder:
    """Records calls in one pool of memory: a result is valid until the next replay of any of them.

    If one call can't be recorded, no other is: the operator that forbids it is in all forwards of the model.
    """

    def __init__(self, device: torch.device, capture: Callable[[Replay], Replay] | None = None) -> None:
        """capture: another way to record a call, for tests without a GPU."""
        self._device = device
        self._capture = capture or _Pool(device).capture
        self.error: RuntimeError | None = None  # why a call could not be recorded

    def sharing_pool(self) -> "GraphRecorder":
        """Return a recorder with the same memory and its own `error`, for calls of another model."""
        return GraphRecorder(self._device, self._capture)

    def record(self, run: Replay) -> Replay:
        """Return a replay of the call, or the call itself if it can't be recorded.

        Raises torch.OutOfMemoryError if there is too little memory now.
        """
        if self.error is not None:
            return run
        try:
            return self._capture(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning("no CUDA graphs, which costs speed: %s", error)
            self.error = error
            return run


def graph_sizes(most: int) -> list[int]:
    """Return 2, 4, 8, …, up to the first that is at least `most`."""
    return [2**power for power in range(1, max(most - 1, 1).bit_length() + 1)]


def record_largest_first(sizes: Sequence[_Size], record: Callable[[_Size], object]) -> list[_Size]:
    """Record a graph of each size, the largest first, because the others use its memory again.

    sizes: ascending. Returns those for which there was memory.
    """
    recorded = []
    for size in reversed(sizes):
        try:
            record(size)
        except torch.OutOfMemoryError:
            _log.warning("no CUDA graph of size %s, which costs speed: out of memory", size)
            torch.cuda.empty_cache()
        else:
            recorded.append(size)
    return recorded[::-1]


class _Pool:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one stream for all, because its workspaces are in the pool

    def capture(self, run: Replay) -> Replay:
        """Capture a call's kernels as a graph. Other threads may go on; only this one must not wait or allocate."""
        current, side, graph = torch.cuda.current_stream(self._device), self._stream, torch.cuda.CUDAGraph()
        with _one_at_a_time:
            side.wait_stream(current)
            try:
                torch.cuda.set_stream(side)
                for _ in range(_WARM_UPS):
                    run()
                with torch.cuda.graph(graph, pool=self._handle, stream=side, capture_error_mode="thread_local"):
                    output = run()
            except RuntimeError:
                self._stop_allocating()
                raise
            finally:
                torch.cuda.set_stream(current)  # torch does not do so after a failed capture
            current.wait_stream(side)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _stop_allocating(self) -> None:
        """End what a failed capture leaves behind in older versions of torch: the allocator still gives from the pool.

        Until then it frees nothing in `torch.cuda.empty_cache` (pytorch/pytorch issue 180395).
        """
        with suppress(RuntimeError, AttributeError):  # it has ended; there is no such function
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._handle)
