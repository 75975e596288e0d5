"""Rows get slots in order of admission, and pages from each other."""

from concurrent.futures import Future
from typing import cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.loops.row import Row
from actors.loops.row_table import RowTable
from actors.wire.messages import Admit
from decoding.grammars.structure import StructureState
from decoding.sampling.params import SamplingParams
from engine.model.page_tables import PageTables
from tests.support.properties import repeatable


def make_row(request_id: int, length: int = 3, peer: str = "c", *, tokens: list[int] | None = None) -> Row:
    text = tokens or [1] * length
    return Row(peer, Admit(request_id, text, len(text), SamplingParams(max_tokens=5), 4, drafter=True))


def make_table(slots: int, *, capacity: int = 8, pages: int | None = None) -> tuple[RowTable[Row], PageTables]:
    tables = PageTables(slots=slots, capacity=capacity, pages=pages, page_size=4)
    return RowTable(tables), tables


def compute(tables: PageTables, row: Row, limit: int) -> None:
    """Compute a row's next tokens."""
    (run,) = row.inputs(limit)
    tables.reserve(row.slot, run.start, run.end)
    row.cached = run.end


def test_rows_wait_for_slots_in_order() -> None:
    table = make_table(2)[0]
    rows = [make_row(i) for i in range(4)]
    for row in rows:
        table.add(row)
    assert [row.slot for row in rows] == [0, 1, -1, -1]
    assert (len(table), table.report().active, table.report().waiting, table.report().slots) == (2, 2, 2, 2)
    table.remove(("c", 0))
    assert rows[2].slot == 0
    assert list(table) == [rows[1], rows[2]]
    assert table.get(("c", 3)) is rows[3]
    assert table.get(("c", 0)) is None


def test_a_waiting_row_can_be_removed_and_unknown_keys_are_ignored() -> None:
    table = make_table(1)[0]
    first, second = make_row(1), make_row(2)
    table.add(first)
    table.add(second)
    table.remove(("c", 2))
    table.remove(("other", 1))
    assert table.report().waiting == 0
    assert list(table) == [first]


def test_a_row_of_the_same_key_is_replaced() -> None:
    table = make_table(2)[0]
    table.add(make_row(1))
    again = make_row(1)
    table.add(again)
    assert list(table) == [again]
    other = make_row(1, peer="d")
    table.add(other)
    assert {again.slot, other.slot} == {0, 1}
    assert table.report("c").request_ids == table.report("d").request_ids == [1]


def test_a_report_names_attached_drafters() -> None:
    table = make_table(1)[0]
    rows = [make_row(1), make_row(2), make_row(3)]
    rows[0].attached_drafter = rows[2].attached_drafter = "drafter"
    for row in rows:
        table.add(row)
    assert table.report("c").attached_drafters == {1: "drafter", 3: "drafter"}
    assert table.report("other").attached_drafters == {}


@repeatable
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.integers(1, 3))
def test_no_slot_is_lost_or_used_twice(calls: list[tuple[bool, int]], slots: int) -> None:
    table = make_table(slots)[0]
    known: dict[int, Row] = {}
    for add, request_id in calls:
        if add:
            known.pop(request_id, None)
            table.add(known.setdefault(request_id, make_row(request_id)))
        else:
            known.pop(request_id, None)
            table.remove(("c", request_id))
        held = [row.slot for row in table]
        assert len(set(held)) == len(held) == min(slots, len(known))
        assert all(0 <= slot < slots for slot in held)
        assert set(table) == set(list(known.values())[: len(held)]) or len(known) > slots


def test_rows_with_the_same_prompt_wait_for_the_first_and_take_over_its_pages() -> None:
    table, tables = make_table(4, capacity=32)
    prompt = list(range(14))
    first, *_ = rows = [make_row(i, tokens=[*prompt, i]) for i in range(3)]
    other = make_row(3, tokens=[9] * 14)
    for row in (*rows, other):
        table.add(row)
    table.make_ready()
    assert [row.ready for row in (*rows, other)] == [True, False, False, True]
    compute(tables, first, 8)
    table.make_ready()
    assert ([row.cached for row in rows], [row.ready for row in rows]) == ([8, 8, 8], [True, False, False])
    compute(tables, first, 7)
    table.make_ready()
    assert ([row.cached for row in rows], [row.ready for row in rows]) == ([15, 12, 12], [True, True, True])
    assert tables.allocator.used == 4
    assert tables.allocator.shared == 3


def test_a_long_prefix_is_taken_over_in_parts_and_not_computed_meanwhile() -> None:
    table, tables = make_table(2, capacity=64)
    first, second = (make_row(i, tokens=[*range(40), i]) for i in range(2))
    table.add(first)
    compute(tables, first, 41)
    table.make_ready()
    with mock.patch("engine.model.page_tables._MOST_TAKEN", 3):
        table.add(second)
        states = [(second.cached, second.ready)]
        for _ in range(3):
            table.make_ready()
            states.append((second.cached, second.ready))
    assert states == [(12, True), (24, False), (36, False), (40, True)]
    assert (second.reused, tables.allocator.shared) == (40, 10)


def test_keys_of_a_new_text_are_computed_as_its_pages_are() -> None:
    """No turn hashes all of a long prompt."""
    table, tables = make_table(2, capacity=4096)
    row = make_row(1, tokens=list(range(4000)))
    table.add(row)
    table.make_ready()
    assert len(row.page_keys) == 1
    compute(tables, row, 20)
    table.make_ready()
    assert len(row.page_keys) == 6


def test_nobody_waits_for_a_row_that_is_gone_or_rests() -> None:
    table, _ = make_table(3, capacity=32)
    rows = [make_row(i, tokens=list(range(14))) for i in range(3)]
    for row in rows:
        table.add(row)
    table.make_ready()
    assert [row.ready for row in rows] == [True, False, False]
    table.remove(rows[0].key)
    table.make_ready()
    assert [row.ready for row in rows[1:]] == [True, False]
    with mock.patch.object(Row, "resting", True):
        table.make_ready()
    assert [row.ready for row in rows[1:]] == [True, True]


def test_a_row_that_must_compute_its_prompt_takes_nothing_over() -> None:
    table, tables = make_table(2, capacity=32)
    first, second = make_row(1, tokens=list(range(14))), make_row(2, tokens=list(range(14)))
    table.add(first)
    compute(tables, first, 14)
    with mock.patch.object(Row, "may_share", False):
        table.make_ready()
        table.add(second)
        table.make_ready()
    assert (second.cached, second.ready) == (0, True)


def test_rows_wait_until_there_are_pages_for_their_text_and_for_others_to_grow() -> None:
    table, _ = make_table(4, capacity=24, pages=7)
    rows = [make_row(i, tokens=[i] * 7) for i in range(3)]
    for row in rows:
        table.add(row)
    assert [row.slot for row in rows] == [0, 1, -1]  # each has two pages, and may need a third
    assert table.report().waiting == 1
    table.remove(rows[0].key)
    assert rows[2].slot == 0


def test_a_text_that_fills_the_memory_enters_alone() -> None:
    table, _ = make_table(2, capacity=16, pages=4)
    row = make_row(1, tokens=[1] * 15)
    table.add(row)
    assert row.slot == 0


def test_a_preempted_row_comes_back_before_those_that_have_not_begun_and_takes_over_what_is_left() -> None:
    table, tables = make_table(2, capacity=32)
    rows = [make_row(i, tokens=[i] * 14) for i in range(4)]
    for row in rows:
        table.add(row)
        if row.slot >= 0:
            compute(tables, row, 14)
    assert table.preempt_last()
    assert (rows[1].slot, rows[1].cached) == (-1, 0)
    assert not table.preempt_last()  # the other row is alone
    assert tables.allocator.used == 4
    table.make_ready()
    assert rows[1].slot == -1
    table.note_forward()
    table.make_ready()
    assert (rows[1].cached, rows[2].slot) == (12, -1)
    assert [key for _, key in (row.key for row in table)] == [0, 1]


def test_a_preempted_row_comes_back_when_another_ends() -> None:
    table, _ = make_table(2, capacity=32)
    rows = [make_row(i, tokens=[i] * 14) for i in range(2)]
    for row in rows:
        table.add(row)
    assert table.preempt_last()
    table.make_ready()
    assert rows[1].slot == -1
    table.remove(rows[0].key)
    assert rows[1].slot == 0


def test_rows_enter_only_if_each_slot_of_the_others_can_grow() -> None:
    table, tables = make_table(4, capacity=32, pages=9)
    beams = make_row(0, tokens=[1] * 8)
    beams.slots_needed = 3
    table.add(beams)
    compute(tables, beams, 8)
    for slot in beams.slots:
        tables.reserve(slot, 0, 8)
    tables.reserve(beams.slot, 8, 12)  # seven of the nine pages are in use
    row = make_row(1, length=2)
    table.add(row)
    assert row.slot == -1
    table.remove(beams.key)
    assert row.slot == 0


def test_pages_of_a_removed_row_are_known_and_free() -> None:
    table, tables = make_table(1, capacity=32)
    row = make_row(1, tokens=list(range(14)))
    table.add(row)
    compute(tables, row, 14)
    table.remove(row.key)
    assert tables.allocator.used == 0
    again = make_row(2, tokens=list(range(16)))
    table.add(again)
    assert again.cached == 12


def wide_row(request_id: int, slots: int) -> Row:
    row = make_row(request_id)
    row.slots_needed = slots
    return row


def active(table: RowTable[Row]) -> list[int]:
    return [row.key[1] for row in table]


def test_rows_enter_in_the_order_of_their_arrival_at_coordinators() -> None:
    table = make_table(1)[0]
    for request_id, arrived_at_s in ((5, 1.0), (7, 3.0), (6, 2.0), (1, 2.0)):
        row = make_row(request_id)
        row.arrived_at_s = arrived_at_s
        table.add(row)
    order = []
    while len(table):
        order += active(table)
        table.remove(("c", order[-1]))
    assert order == [5, 1, 6, 7]


def test_a_row_that_needs_more_slots_than_are_free_lends_them() -> None:
    """It enters as soon as the rows before it have ended, as if nobody had passed it."""
    table = make_table(4)[0]
    for row in (make_row(1), make_row(2), wide_row(3, 3), make_row(4), make_row(5), make_row(6)):
        table.add(row)
    assert active(table) == [1, 2, 4, 5]
    table.make_ready()
    assert active(table) == [1, 2, 4, 5]
    table.remove(("c", 1))
    assert active(table) == [2, 4, 5, 6]  # somebody may be in a forward, so nobody is preempted
    table.make_ready()
    assert active(table) == [2, 3]
    table.remove(("c", 2))
    assert active(table) == [3, 4]  # which had begun before others, but not by right
    table.remove(("c", 3))
    assert active(table) == [4, 5, 6]


def test_no_more_rows_are_preempted_than_the_waiting_one_needs() -> None:
    table = make_table(4)[0]
    for row in (make_row(1), make_row(2), wide_row(3, 3), make_row(4), make_row(5)):
        table.add(row)
    for request_id in (1, 2):
        table.remove(("c", request_id))
    table.make_ready()
    assert active(table) == [4, 3]
    assert table.preemptions == 1


@pytest.mark.parametrize(("pages", "together"), [(9, [3, 2]), (8, [2])])
def test_a_row_for_which_there_are_too_few_pages_lends_them(pages: int, together: list[int]) -> None:
    table, tables = make_table(4, capacity=24, pages=pages)
    first, long, short = make_row(1, tokens=[1] * 15), make_row(2, tokens=[2] * 20), make_row(3, tokens=[3] * 3)
    for row in (first, long, short):
        table.add(row)
        if row.slot >= 0:
            compute(tables, row, 20)
    assert active(table) == [1, 3]
    table.make_ready()
    assert active(table) == [1, 3]
    table.remove(first.key)
    table.make_ready()
    assert active(table) == together


def test_pages_that_a_borrower_shares_count_once() -> None:
    """Its own pages are free once it leaves; those that others hold, too, are not."""
    tables = make_table(3, capacity=24, pages=12)[1]
    slots = [tables.take()[0] for _ in range(3)]
    for slot in slots[:2]:
        tables.reserve(slot, 0, 8)
    tables.fork(slots[0], slots[2], 8)
    assert tables.released_pages(slots[:1]) == set()
    assert tables.released_pages(slots[1:]) == {tables.page(slots[1], column) for column in (0, 4)}
    assert len(tables.released_pages(slots)) == 4
    assert tables.allocator.available == 8


def test_rows_whose_grammar_is_compiled_hold_no_slot_and_do_not_count_as_waiting() -> None:
    table = make_table(1)[0]
    first, second, grammar = make_row(1), make_row(2), cast(StructureState, object())
    first.preparing = Future()
    for row in (first, second):
        table.add(row)
    assert active(table) == [2]
    assert (table.report("c").active, table.report("c").waiting, table.report("c").own_waiting) == (2, 0, 0)
    assert table.is_preparing
    table.remove(second.key)
    first.preparing.set_result(grammar)
    assert table.make_ready() == []
    assert active(table) == [1]
    assert first.structure is grammar
    assert not table.is_preparing


def test_the_grammar_of_a_row_that_is_gone_is_not_compiled() -> None:
    table = make_table(1)[0]
    row = make_row(1)
    row.preparing = Future()
    table.add(row)
    table.remove(row.key)
    assert row.preparing.cancelled()


def test_a_row_whose_adapter_is_loaded_holds_no_slot() -> None:
    table = make_table(1)[0]
    first, second = make_row(1), make_row(2)
    first.adapter_slot = None
    for row in (first, second):
        table.add(row)
    assert active(table) == [2]
    first.adapter_slot = 1
    table.remove(second.key)
    assert active(table) == [1]


def test_a_long_text_that_lacks_pages_counts_those_of_others_few_times() -> None:
    """Never if all others were too few, else as often as a bisection asks."""
    table, tables = make_table(64, capacity=4096, pages=160)
    blocker, head = make_row(0, tokens=[1] * 200), make_row(1, tokens=[2] * 500)
    others = [make_row(2 + index, tokens=[3 + index] * 3) for index in range(30)]
    for row in (blocker, head, *others):
        table.add(row)
        if row.slot >= 0:
            compute(tables, row, 500)
    assert len(table) == 31
    with mock.patch.object(tables, "released_pages", wraps=tables.released_pages) as released:
        table.make_ready()
        assert (head.slot, released.call_count) == (-1, 0)
        blocker.entered = False
        blocker.arrived_at_s = 1.0
        table.make_ready()
        assert head.slot >= 0
        assert 1 <= released.call_count <= 6
    assert active(table)[-1] == 1


def test_a_known_text_that_lacks_pages_is_looked_up_in_few_places() -> None:
    table, tables = make_table(8, capacity=8192, pages=2100)
    text = list(range(8000))
    first = make_row(0, tokens=text)
    table.add(first)
    compute(tables, first, 8000)
    table.remove(first.key)  # all of its pages are known
    other = make_row(1, tokens=[9] * 500)
    table.add(other)
    compute(tables, other, 500)
    rows = [make_row(2 + index, tokens=text) for index in range(5)]
    with mock.patch.object(tables.allocator, "find", wraps=tables.allocator.find) as find:
        for row in rows:
            table.add(row)
        table.make_ready()
    assert [row.slot for row in rows] == [-1] * 5
    assert find.call_count < 100
