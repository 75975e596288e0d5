"""Replaces the weights of a loop's model between two steps, in such an order that no text is written by two of them."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Generic

from msgspec.structs import replace

from actors.loops.row import R
from actors.loops.row_table import RowTable
from actors.wire.messages import Weights, WeightsState
from decoding.errors import ConsortError
from engine.loading.new_weights import ReplaceableWeights

_log = logging.getLogger(__name__)


class WeightsSwitch(Generic[R]):
    """Which weights come next. A version that could not be loaded is tried again only after a sleep."""

    def __init__(
        self, rows: RowTable[R], model: ReplaceableWeights | None, announce: Callable[[], None], *, at_once: bool
    ) -> None:
        """
        model: None: its weights stay.
        announce: reports the new state soon.
        at_once: rows go on with new weights, as a drafter's may. Otherwise each has those of its admission.
        """
        self._rows, self._model, self._announce, self._at_once = rows, model, announce, at_once
        self._wanted = Weights()
        rows.by_weights = model is not None and not at_once

    def want(self, weights: Weights, rest: int) -> None:
        """Load these weights when no row needs others, or drop all and the cache. What is known changes nothing.

        rest: as in SetWeights.
        """
        if weights.order > self._wanted.order:
            self._wanted = weights
        if rest > self._rows.weights.rest:
            self._rows.weights = replace(self._rows.weights, rest=rest, unfit="", error="")  # may succeed now
            self._announce()

    @property
    def is_due(self) -> bool:
        """Whether `turn` loads or drops weights."""
        return self._model is not None and (self._falls_asleep or self._next() is not None)

    def turn(self) -> None:
        """Load the weights that come next, if no row needs the present ones, or drop these."""
        if self._model is None:
            return
        if self._falls_asleep:
            self._change(self._model.drop, replace(self._rows.weights, asleep=True), unfit="")
        weights = self._next()
        if weights is not None:
            after = WeightsState(weights, rest=self._rows.weights.rest)
            self._change(partial(self._load, self._model, weights), after, unfit=weights.version)

    def _change(self, change: Callable[[], None], after: WeightsState, *, unfit: str) -> None:
        for row in list(self._rows):
            self._rows.preempt(row)
        try:
            change()
        except (ConsortError, OSError, ValueError, RuntimeError) as error:
            _log.warning("weights %s: %s", unfit, error)
            self._rows.weights = replace(self._rows.weights, unfit=unfit, error=str(error))
        else:
            self._rows.weights = after
        self._announce()

    def _load(self, model: ReplaceableWeights, weights: Weights) -> None:
        state = self._rows.weights
        if state.asleep or not weights.is_same(state.present):
            model.load(weights.path, weights.order[1])

    @property
    def _rests(self) -> bool:
        state = self._rows.weights
        return state.rest % 2 == 1 and (not state.error or bool(state.unfit))  # it may have failed to

    @property
    def _falls_asleep(self) -> bool:
        is_free = self._at_once or (not len(self._rows) and self._rows.first_weights() is None)
        return self._rests and is_free and not self._rows.weights.asleep

    def _next(self) -> Weights | None:
        state = self._rows.weights
        if not self._at_once and len(self._rows):
            return None
        weights = None if self._at_once else self._rows.first_weights()
        if weights is None:
            weights = None if self._rests else self._wanted
        is_present = weights is not None and weights.version == state.present.version and not state.asleep
        return None if weights is None or is_present or weights.version == state.unfit else weights
