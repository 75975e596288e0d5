"""Replaces the weights of a loop's model between two steps, in such an order that no text is written by two of them."""

import logging
from collections.abc import Callable
from operator import attrgetter
from typing import Generic

from msgspec.structs import replace

from actors.loops.row import R
from actors.loops.row_table import RowTable
from actors.wire.messages import Weights, WeightsState
from decoding.errors import ConsortError
from engine.loading.new_weights import ReplaceableWeights

_log = logging.getLogger(__name__)


class WeightsSwitch(Generic[R]):
    """Which weights come next. A version that could not be loaded is not tried again."""

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

    def want(self, weights: Weights) -> None:
        """Load these weights when no row needs others, unless later ones are wanted already."""
        self._wanted = max(self._wanted, weights, key=attrgetter("order"))

    @property
    def is_due(self) -> bool:
        """Whether `turn` loads weights."""
        return self._model is not None and self._next() is not None

    def turn(self) -> None:
        """Load the weights that come next, if no row needs the present ones."""
        weights = None if self._model is None else self._next()
        if self._model is None or weights is None:
            return
        for row in list(self._rows):
            self._rows.preempt(row)
        try:
            if not weights.is_same(self._rows.weights.present):
                self._model.load(weights.path, weights.order[1])
        except (ConsortError, OSError, ValueError, RuntimeError) as error:
            _log.warning("weights %s can't be loaded: %s", weights.version, error)
            self._rows.weights = replace(self._rows.weights, unfit=weights.version, error=str(error))
        else:
            self._rows.weights = WeightsState(weights)
        self._announce()

    def _next(self) -> Weights | None:
        state = self._rows.weights
        if not self._at_once and len(self._rows):
            return None
        weights = None if self._at_once else self._rows.first_weights()
        weights = weights or self._wanted
        return None if weights.version in (state.present.version, state.unfit) else weights
