"""What makes a target's steps faster, and its first ones can do without: done in parts, between its turns."""

import time
from collections.abc import Callable, Iterator, Sequence

from actors.verifier.step_cost import StepCost, step_cost_in_parts
from engine.model.runner import PRACTICE_PAGES, Runner

_SLICE_S = 0.1  # for which parts are done at once
_SHARE = 0.25  # of the time, while requests wait for steps


class Practice:
    """Traces a runner's model and times its steps. It holds two slots until it ends."""

    def __init__(self, runner: Runner, note: Callable[[StepCost], None]) -> None:
        """note: gets what steps cost afterwards."""
        self._cache, self._rests_until_s = runner.cache, 0.0
        slots = [self._cache.take()[0] for _ in range(2 if runner.practises_later else 0)]
        self._parts = self._all(runner, slots, note) if slots else iter(())
        self.is_over = not slots

    def turn(self, *, busy: bool) -> float:
        """Do some parts, or none if requests wait and it had its share. Returns the seconds that it took."""
        began_s = time.perf_counter()
        has_room = self._cache.allocator.available >= PRACTICE_PAGES
        if self.is_over or (busy and not (has_room and began_s >= self._rests_until_s)):
            return 0.0
        seconds = 0.0
        while not self.is_over and seconds < _SLICE_S:
            self.is_over = next(self._parts, self) is self
            seconds = time.perf_counter() - began_s
        self._rests_until_s = began_s + seconds / _SHARE
        return seconds

    def _all(self, runner: Runner, slots: Sequence[int], note: Callable[[StepCost], None]) -> Iterator[None]:
        yield from runner.practice(slots)
        note((yield from step_cost_in_parts(runner, slots[0])))
        runner.practises_later = False
        for slot in slots:
            self._cache.give_back(slot)
