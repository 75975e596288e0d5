"""Rows get slots in order of admission, and chosen prefills fit their budget."""

from hypothesis import given
from hypothesis import strategies as st

from actors.loops.row_table import Row, RowTable, choose_prefill, in_slot_order
from actors.model.kv_pages import KVPages
from actors.wire.messages import Admit
from decoding.sampling.params import SamplingParams
from tests.support.properties import repeatable


def make_row(request_id: int, length: int = 3, peer: str = "c") -> Row:
    return Row(peer, Admit(request_id, [1] * length, length, SamplingParams(max_tokens=5), 4, drafter=True))


def make_table(slots: int) -> RowTable[Row]:
    return RowTable(KVPages(slots=slots, capacity=8))


def test_rows_wait_for_slots_in_order() -> None:
    table = make_table(2)
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
    table = make_table(1)
    first, second = make_row(1), make_row(2)
    table.add(first)
    table.add(second)
    table.remove(("c", 2))
    table.remove(("other", 1))
    assert table.report().waiting == 0
    assert list(table) == [first]


def test_a_row_of_the_same_key_is_replaced() -> None:
    table = make_table(2)
    table.add(make_row(1))
    again = make_row(1)
    table.add(again)
    assert list(table) == [again]
    other = make_row(1, peer="d")
    table.add(other)
    assert {again.slot, other.slot} == {0, 1}
    assert table.report("c").request_ids == table.report("d").request_ids == [1]


def test_a_report_names_attached_drafters() -> None:
    table = make_table(1)
    rows = [make_row(1), make_row(2), make_row(3)]
    rows[0].attached_drafter = rows[2].attached_drafter = "drafter"
    for row in rows:
        table.add(row)
    assert table.report("c").attached_drafters == {1: "drafter", 3: "drafter"}
    assert table.report("other").attached_drafters == {}


@repeatable
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.integers(1, 3))
def test_no_slot_is_lost_or_used_twice(calls: list[tuple[bool, int]], slots: int) -> None:
    table = make_table(slots)
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


@repeatable
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 32))
def test_chosen_prefills_fit_the_budget(lengths: list[int], budget: int) -> None:
    rows = [make_row(i, length) for i, length in enumerate(lengths)]
    chosen = choose_prefill(rows, budget)
    assert chosen == rows[: len(chosen)]
    assert chosen
    assert sum(len(row.next_input(budget).tokens) for row in chosen) <= budget


def test_running_rows_are_in_slot_order_after_others_were_removed() -> None:
    """Then they read the cache as one slice. A reused slot breaks the order of admission."""
    table = make_table(3)
    for request_id in (1, 2, 3):
        table.add(make_row(request_id))
    table.remove(make_row(1).key)
    table.add(make_row(4))
    assert [row.slot for row in in_slot_order(table)] == [0, 1, 2]
