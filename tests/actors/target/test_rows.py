"""Rows whose requests need slots on several replicas make room for each other, the oldest first."""

from collections.abc import Sequence

import pytest

from actors.loops.served_row import ServedRow
from actors.model.page_tables import PageTables
from actors.target.rows import TargetRows
from actors.wire.messages import Admit
from decoding.sampling.params import SamplingParams

PATIENCE_S = 5.0


class PlainRow(ServedRow):
    """A row that has read its text."""

    def __init__(self, request_id: int) -> None:
        super().__init__("c", Admit(request_id, [1, 1, 1], 3, SamplingParams(max_tokens=5), 0, drafter=False))

    def resume(self, count: int) -> None:
        self.cached = len(self.tokens) - 1


class EnsembleRow(PlainRow):
    """The same, of a request that needs slots on several replicas."""

    spans_replicas = True
    started = False


class StartedRow(EnsembleRow):
    started = True


def add(*rows: ServedRow) -> TargetRows:
    """Return two slots with these rows, of which the last waits."""
    table = TargetRows(PageTables(slots=2, capacity=8, page_size=4))
    for row in rows:
        table.add(row)
    return table


def active(table: TargetRows) -> Sequence[int]:
    return [row.key[1] for row in table]


def test_the_youngest_blocked_row_makes_room_for_an_older_one_after_a_while() -> None:
    table = add(EnsembleRow(3), EnsembleRow(4), EnsembleRow(2))
    for now_s in (100, 100 + PATIENCE_S):
        table.resolve_deadlock(now_s)
        assert active(table) == [3, 4]
    table.resolve_deadlock(100.1 + PATIENCE_S)
    assert active(table) == [3, 2]


@pytest.mark.parametrize(
    "rows",
    [
        (EnsembleRow(3), EnsembleRow(4), EnsembleRow(5)),
        (StartedRow(3), StartedRow(4), EnsembleRow(2)),
        (PlainRow(3), PlainRow(4), EnsembleRow(2)),
        (EnsembleRow(3), EnsembleRow(4), PlainRow(2)),
    ],
    ids=["a younger one waits", "both have started", "both are on one replica", "what waits needs one slot"],
)
def test_no_other_row_makes_room(rows: Sequence[ServedRow]) -> None:
    table = add(*rows)
    for now_s in (100, 200):
        table.resolve_deadlock(now_s)
    assert active(table) == [3, 4]


def test_a_request_that_has_started_comes_before_older_ones() -> None:
    table = add(EnsembleRow(1), EnsembleRow(2), StartedRow(3))
    for now_s in (100, 200):
        table.resolve_deadlock(now_s)
    assert active(table) == [1, 3]


def test_patience_begins_anew_with_each_time_that_a_row_is_blocked() -> None:
    first, second = EnsembleRow(3), EnsembleRow(4)
    table = add(first, second, EnsembleRow(2))
    for now_s, cached in ((100, 2), (104, 0), (106, 2), (110, 2)):
        first.cached = second.cached = cached  # with 0 they read their text
        table.resolve_deadlock(now_s)
        assert active(table) == [3, 4]
    table.resolve_deadlock(112)
    assert active(table) == [3, 2]
