"""The host's side of a step on the `meta` device: its own time, and fake results where it reads from the device."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCH_S = 5e-6  # from Python to the queue of a GPU, for an operator of torch


class HostClock(TorchDispatchMode):
    """Measures the time of a block in seconds of this thread, so that other processes do not count.

    What torch needs to work out shapes on `meta` is not part of it: some operators take 100 times as long there. Each
    counts as long as a launch on a GPU takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self.exposed_s = 0.0  # of `seconds`: while the device has nothing to do
        self._idle_since_s: float | None = 0.0  # in `seconds`; None: the device computes

    def __enter__(self) -> "HostClock":
        super().__enter__()  # type: ignore[no-untyped-call]
        self.seconds -= time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time()
        self._end_idleness(self.seconds)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def note_forward(self) -> None:
        """Note that the device has begun to compute. It ends when the host reads from it."""
        self._end_idleness(self.seconds + time.thread_time())

    def _end_idleness(self, now_s: float) -> None:
        if self._idle_since_s is not None:
            self.exposed_s += now_s - self._idle_since_s
        self._idle_since_s = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        began_s = time.thread_time()
        result = function(*args, **(kwargs or {}))
        ended_s = time.thread_time()
        given, made = _on_device((args, kwargs)), _on_device(result)
        self.seconds += LAUNCH_S if given or made else ended_s - began_s
        self.seconds -= time.thread_time() - began_s  # with the clock's own work
        if given and not made and self._idle_since_s is None:  # a read, which waits for the device
            self._idle_since_s = self.seconds + time.thread_time()
        return result


def _on_device(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(values))


@contextmanager
def fake_results() -> Iterator[None]:
    """Let reads from the `meta` device give zeros, and True for a truth value.

    Replaces two of torch's operators for the whole process, at the cost of a Python call.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has kernels for both
        library.impl("copy_", _copy, "Meta")
        library.impl("_local_scalar_dense", _scalar, "Meta")
    try:
        yield
    finally:
        library._destroy()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return target if target.is_meta else target.zero_()


def _scalar(tensor: Tensor) -> float | bool:
    return tensor.dtype == torch.bool or tensor.new_empty((), device="cpu").zero_().item()
