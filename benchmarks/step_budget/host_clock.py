"""The host's own time: what torch needs to work out shapes on the `meta` device is not part of it.

An operator counts as long as a launch on a GPU takes, because some take 100 times as long on `meta`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCH_S = 5e-6  # from Python to the queue of a GPU, for an operator of torch


class HostClock(TorchDispatchMode):
    """Measures the time of a block in seconds of this thread, so that other processes do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __enter__(self) -> "HostClock":
        super().__enter__()  # type: ignore[no-untyped-call]
        self.seconds -= time.thread_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.thread_time()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        began_s = time.thread_time()
        result = function(*args, **(kwargs or {}))
        ended_s = time.thread_time()
        on_device = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, result)))
        self.seconds += LAUNCH_S if on_device else ended_s - began_s
        self.seconds -= time.thread_time() - began_s  # with the clock's own work
        return result
