"""The replica table assigns requests, judges signs of life, and finds requests to move."""

from actors.coordinator.replica_table import ReplicaTable
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report


def make_table(*names: str, model: str = "m") -> ReplicaTable:
    table = ReplicaTable()
    for name in names:
        table.add(ReplicaAddress(name, model), 0.0)
    return table


def test_requests_spread_and_released_ones_no_longer_count() -> None:
    table = make_table("a", "b")
    assert {table.assign("m", 1), table.assign("m", 2)} == {"a", "b"}
    third = table.assign("m", 3)
    for request_id in (1, 2, 3):
        table.release(third, request_id)
    assert table.assign("m", 4) == third
    table.release("gone", 1)
    table.release(None, 1)


def test_other_coordinators_load_counts() -> None:
    table = make_table("a", "b")
    table.record_message("a", 1.0, Report(active=2, waiting=1, slots=4, request_ids=[]))
    table.record_message("gone", 1.0, None)
    assert [table.assign("m", i) for i in range(3)] == ["b", "b", "b"]


def test_a_replica_whose_memory_is_full_gets_nothing_while_another_has_room() -> None:
    table = make_table("a", "b")
    for name, report_ in (("a", Report(2, 1, 16, [1, 2, 3])), ("b", Report(9, 0, 16, []))):
        table.record_message(name, 1.0, report_)
    assert table.assign("m", 10) == "b"


def test_a_model_without_replicas_gets_no_requests() -> None:
    table = make_table("a")
    assert table.assign("other", 1) is None
    assert table.models() == {"m"}


def test_removing_a_replica_returns_its_requests() -> None:
    table = make_table("a")
    table.assign("m", 1)
    table.assign("m", 2)
    assert set(table.requests_on("a")) == {1, 2}
    assert table.remove("a") == {1, 2}
    assert table.names() == table.models() == set()


def test_a_silent_replica_is_suspected_at_once_unless_it_is_healthy() -> None:
    table = make_table("a", "b")
    table.assign("m", 1)
    (name,) = [name for name in ("a", "b") if table.requests_on(name)]
    (other,) = {"a", "b"} - {name}
    for now_s in range(9):
        table.set_listed({"a", "b"}, {name}, float(now_s))
        table.record_message(other, float(now_s), None)
        table.update_suspicions(float(now_s))
        assert table.requests_to_move() == []
    for now_s in range(9, 13):
        table.record_message(other, float(now_s), None)
    table.update_suspicions(12.5)
    assert table.requests_to_move() == [(name, 1)]
    assert [table.assign("m", i) for i in (2, 3)] == [other, other]
    table.record_message(name, 13.0, None)
    table.update_suspicions(13.0)
    assert table.requests_to_move() == []


def test_a_replica_that_leaves_gets_nothing_new_and_is_given_up_when_silent() -> None:
    table = make_table("a", "b")
    table.set_listed({"b"}, {"b"}, 1.0)
    assert [table.assign("m", i) for i in range(3)] == ["b", "b", "b"]
    assert table.drained() == []  # until its reports confirm that it has no requests
    for requests in ([7], [], []):
        table.record_message("a", 0.0, report(len(requests), request_ids=requests))
    assert table.drained() == ["a"]
    assert table.timed_out(3.0, 60.0) == []
    assert table.timed_out(5.0, 60.0) == ["a"]
    table.set_listed({"a", "b"}, {"a", "b"}, 6.0)
    assert table.assign("m", 9) == "a"


def report(active: int, waiting: int = 0, request_ids: list[int] | None = None) -> Report:
    ids = request_ids or []
    return Report(active=active, waiting=waiting, slots=4, request_ids=ids, own_waiting=min(waiting, len(ids)))


def test_loads_are_compared_only_when_they_are_known() -> None:
    table = make_table("a")
    for request_id in range(6):
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    assert table.find_imbalance("m") == ("", 0)
    for _ in range(2):
        table.record_message("a", 1.0, report(6))
        table.record_message("b", 1.0, report(0))
    assert table.find_imbalance("m") == ("a", 3)
    table.release("a", 0)
    assert table.find_imbalance("m") == ("", 0)


def test_no_more_waiting_requests_move_than_there_are_free_slots() -> None:
    table = make_table("a")
    ids = list(range(10))
    for request_id in ids:
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    for _ in range(2):
        table.record_message("a", 1.0, report(4, 6, ids))
        table.record_message("b", 1.0, report(0))
    assert table.waiting_requests_to_move("m") == [4, 5, 6, 7]


def test_requests_that_run_do_not_move_because_those_of_others_wait() -> None:
    table = make_table("a")
    for request_id in range(4):
        table.assign("m", request_id)
    table.add(ReplicaAddress("b", "m"), 0.0)
    for _ in range(2):
        table.record_message("a", 1.0, Report(active=4, waiting=3, slots=4, request_ids=[0, 1, 2, 3], own_waiting=1))
        table.record_message("b", 1.0, report(0))
    assert table.waiting_requests_to_move("m") == [3]
