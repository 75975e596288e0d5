"""What a replica makes of messages about weights that come twice, late or not at all."""

from unittest import mock

import pytest

from actors.loops.row_table import RowTable
from actors.loops.weights import WeightsSwitch
from actors.wire.messages import Weights, WeightsState
from engine.loading.new_weights import ReplaceableWeights
from tests.actors.loops.test_row_table import make_table

NONE, ONE, TWO = Weights(), Weights("1-aa", "/one"), Weights("2-bb", "/two")


@pytest.mark.parametrize(
    ("messages", "after", "changes"),
    [
        ([(NONE, 1), (NONE, 2)], WeightsState(NONE, rest=2), ["drop", "load"]),
        ([(NONE, 1), (NONE, 1), (NONE, 2), (NONE, 2)], WeightsState(NONE, rest=2), ["drop", "load"]),
        ([(NONE, 2), (NONE, 1)], WeightsState(NONE, rest=2), []),
        ([(TWO, 0), (ONE, 1)], WeightsState(TWO, asleep=True, rest=1), ["load", "drop"]),
        ([(NONE, 1), (ONE, 0), (ONE, 2)], WeightsState(ONE, rest=2), ["drop", "load"]),
        ([(NONE, 3), (ONE, 2), (TWO, 1)], WeightsState(NONE, asleep=True, rest=3), ["drop"]),
    ],
    ids=["as sent", "twice", "in the wrong order", "older weights, later sleep", "while it sleeps", "late wakes"],
)
def test_the_latest_counts(messages: list[tuple[Weights, int]], after: WeightsState, changes: list[str]) -> None:
    table: RowTable = make_table(1)[0]
    model = mock.create_autospec(ReplaceableWeights, instance=True)
    switch = WeightsSwitch(table, model, mock.Mock(), at_once=False)
    for weights, rest in messages:
        switch.want(weights, rest)
        if switch.is_due:
            switch.turn()
    assert table.weights == after
    assert [name for name, *_ in model.method_calls] == changes


def test_what_failed_is_tried_again_only_when_asked() -> None:
    table: RowTable = make_table(1)[0]
    model = mock.create_autospec(ReplaceableWeights, instance=True)
    model.drop.side_effect = ValueError("it can't")
    switch = WeightsSwitch(table, model, mock.Mock(), at_once=False)
    for rest in (1, 1, 2, 3):
        switch.want(NONE, rest)
        switch.turn()
    assert model.drop.call_count == 2
    assert table.weights == WeightsState(NONE, error="it can't", rest=3)
