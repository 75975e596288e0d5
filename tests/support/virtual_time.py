"""An event loop whose clock goes on only while there is nothing to do: seconds pass at once, computing takes none."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

_Result = TypeVar("_Result")
_POLL_S = 0.001  # while a thread works


class _Selector(selectors.DefaultSelector):
    """Does not wait: it lets the clock pass instead. While threads work, the clock stands."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.working = 1000.0, 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(_POLL_S if self.working and timeout != 0 else 0)
        if not ready and not self.working:
            self.now_s += timeout or 0.0
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self.clock.working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._count_done)
        return future

    def _count_done(self, _: object) -> None:
        self.clock.working -= 1


def run(coroutine: Coroutine[Any, Any, _Result], monkeypatch: pytest.MonkeyPatch) -> _Result:
    """Run a coroutine in such a loop. `time.monotonic` is its clock, too."""
    with asyncio.Runner(loop_factory=_Loop) as runner, monkeypatch.context() as patch:
        patch.setattr("time.monotonic", runner.get_loop().time)
        return runner.run(coroutine)
