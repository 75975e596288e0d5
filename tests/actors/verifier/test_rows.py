"""Rows whose requests need slots on several replicas make room for each other, the oldest first."""

from collections.abc import Sequence

import pytest

from actors.loops.row import ServedRow
from actors.verifier.proposers import TextLookup
from actors.verifier.rows import TargetRow, TargetRows
from actors.wire.messages import Admit
from decoding.drafts.ngram import NgramLookup
from decoding.sampling.params import SamplingParams
from engine.model.page_tables import PageTables


class PlainRow(ServedRow):
    def __init__(self, request_id: int) -> None:
        admit = Admit(request_id, [1, 1, 1], 3, SamplingParams(max_tokens=5), 0, drafter=False)
        super().__init__("c", admit)


class EnsembleRow(PlainRow):
    """A row of a request that needs slots on several replicas."""

    spans_replicas = True
    started = False
    lends = False


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


@pytest.mark.parametrize("waiting", [EnsembleRow, PlainRow])
def test_the_youngest_row_that_has_not_started_makes_room_for_an_older_one_at_once(waiting: type[PlainRow]) -> None:
    table = add(EnsembleRow(3), EnsembleRow(4), waiting(2))
    assert active(table) == [3, 4]  # a row may be in a forward
    table.make_ready()
    assert active(table) == [3, 2]


@pytest.mark.parametrize(
    "rows",
    [
        (EnsembleRow(3), EnsembleRow(4), EnsembleRow(5)),
        (StartedRow(3), StartedRow(4), EnsembleRow(2)),
        (PlainRow(3), PlainRow(4), EnsembleRow(2)),
    ],
    ids=["a younger one waits", "both have started", "both are on one replica"],
)
def test_no_other_row_makes_room(rows: Sequence[ServedRow]) -> None:
    table = add(*rows)
    table.make_ready()
    assert active(table) == [3, 4]


def test_a_request_that_has_started_comes_before_older_ones() -> None:
    table = add(EnsembleRow(1), EnsembleRow(2), StartedRow(3))
    table.make_ready()
    assert active(table) == [1, 3]


def test_when_pages_run_out_requests_that_have_started_make_room_last_and_in_one_order() -> None:
    rows = [StartedRow(4), StartedRow(3), EnsembleRow(1), PlainRow(2)]
    table = TargetRows(PageTables(slots=4, capacity=8, page_size=4))
    for row in rows:
        table.add(row)
    for _ in range(3):
        assert table.preempt_last()
    assert active(table) == [2]
    table.note_forward()
    table.make_ready()
    assert active(table) == [2, 3, 4, 1]


def test_a_row_that_waits_for_a_slot_elsewhere_lends_its_own_until_it_can_go_on() -> None:
    lender, borrower = EnsembleRow(1), PlainRow(3)
    table = add(lender, PlainRow(2), borrower)
    table.make_ready()
    assert active(table) == [1, 2]
    lender.lends = True
    table.make_ready()
    assert active(table) == [2, 3]
    assert lender.has_lent
    table.add(EnsembleRow(4))
    table.make_ready()
    assert active(table) == [2, 3]  # an ensemble borrows nothing
    lender.lends = False
    table.make_ready()
    assert active(table) == [2, 1]
    assert not lender.has_lent


def test_a_row_that_lends_takes_what_nobody_else_wants_but_preempts_none() -> None:
    lender = EnsembleRow(1)
    lender.lends = True
    table = add(EnsembleRow(2), PlainRow(3), lender)
    table.make_ready()
    assert active(table) == [2, 3]
    table.remove(("c", 3))
    assert active(table) == [2, 1]


def looking_up(request_id: int, length: int) -> TargetRow:
    """Return a row whose prompt goes on as it began."""
    prompt = [index % (length // 2) for index in range(length)]
    admit = Admit(request_id, prompt, length, SamplingParams(max_tokens=5), 4, drafter=False)
    return TargetRow("c", admit, acceptance=0.5, lookups=[NgramLookup(4, capacity=length)])


def turns_to_draft(*rows: TargetRow) -> list[int]:
    """Return after how many turns each row has a draft."""
    table = TargetRows(PageTables(slots=len(rows), capacity=131_072))
    for row in rows:
        table.add_writer(row)
    lookup, turns = TextLookup(table), [0] * len(rows)
    while not all(row.drafts.trie for row in rows):
        lookup.read()
        for index, row in enumerate(rows):
            turns[index] += not row.drafts.trie
            row.drafts.look_up()
    return turns


def test_proposers_read_a_long_text_in_few_turns() -> None:
    """After a prefix that was in the cache these are steps without a draft."""
    assert turns_to_draft(looking_up(1, 130_000)) == [16]


def test_proposers_of_all_rows_share_what_is_read_in_a_turn_and_a_short_text_waits_for_no_long_one() -> None:
    texts = [looking_up(1, 40_000), looking_up(2, 30_000), looking_up(3, 1000)]
    assert turns_to_draft(*texts) == [9, 4, 1]
