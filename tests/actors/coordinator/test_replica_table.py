"""Where requests go."""

from actors.coordinator.replica_table import ReplicaTable
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report


def make_placement(*names: str, model: str = "m") -> ReplicaTable:
    placement = ReplicaTable()
    for name in names:
        placement.add(ReplicaAddress(name, model), 0.0)
    return placement


def test_requests_spread_and_released_ones_no_longer_count() -> None:
    placement = make_placement("a", "b")
    assert {placement.assign("m", 1), placement.assign("m", 2)} == {"a", "b"}
    third = placement.assign("m", 3)
    for request_id in (1, 2, 3):
        placement.release(third, request_id)
    assert placement.assign("m", 4) == third
    placement.release("gone", 1)
    placement.release(None, 1)


def test_other_coordinators_load_counts() -> None:
    placement = make_placement("a", "b")
    placement.heard("a", 1.0, Report(active=2, waiting=1, slots=4, request_ids=[]))
    placement.heard("gone", 1.0, None)
    assert [placement.assign("m", i) for i in range(3)] == ["b", "b", "b"]


def test_a_model_without_replicas_has_no_place() -> None:
    placement = make_placement("a")
    assert placement.assign("other", 1) is None
    assert placement.models() == {"m"}


def test_removing_a_replica_returns_its_requests() -> None:
    placement = make_placement("a")
    placement.assign("m", 1)
    placement.assign("m", 2)
    assert set(placement.on("a")) == {1, 2}
    assert placement.remove("a") == {1, 2}
    assert placement.names() == placement.models() == set()


def test_a_silent_replica_is_suspected_at_once_unless_it_answers() -> None:
    placement = make_placement("a", "b")
    placement.assign("m", 1)
    (name,) = [name for name in ("a", "b") if placement.on(name)]
    (other,) = {"a", "b"} - {name}
    for now_s in range(9):
        placement.are_up({"a", "b"}, {name}, float(now_s))
        placement.heard(other, float(now_s), None)
        placement.look(float(now_s))
        assert placement.misplaced() == []
    for now_s in range(9, 13):
        placement.heard(other, float(now_s), None)
    placement.look(12.5)
    assert placement.misplaced() == [(name, 1)]
    assert [placement.assign("m", i) for i in (2, 3)] == [other, other]
    placement.heard(name, 13.0, None)
    placement.look(13.0)
    assert placement.misplaced() == []


def test_a_replica_that_leaves_gets_nothing_new_and_is_given_up_when_silent() -> None:
    placement = make_placement("a", "b")
    placement.are_up({"b"}, {"b"}, 1.0)
    assert [placement.assign("m", i) for i in range(3)] == ["b", "b", "b"]
    assert placement.left() == []  # as long as it has not said that it has nothing left
    for requests in ([7], [], []):
        placement.heard("a", 0.0, report(len(requests), request_ids=requests))
    assert placement.left() == ["a"]
    assert placement.silent(3.0, 60.0) == []
    assert placement.silent(5.0, 60.0) == ["a"]
    placement.are_up({"a", "b"}, {"a", "b"}, 6.0)
    assert placement.assign("m", 9) == "a"


def report(active: int, waiting: int = 0, request_ids: list[int] | None = None) -> Report:
    return Report(active=active, waiting=waiting, slots=4, request_ids=request_ids or [])


def test_loads_are_compared_only_when_they_are_known() -> None:
    placement = make_placement("a")
    for request_id in range(6):
        placement.assign("m", request_id)
    placement.add(ReplicaAddress("b", "m"), 0.0)
    assert placement.uneven("m") == ("", 0)
    for _ in range(2):
        placement.heard("a", 1.0, report(6))
        placement.heard("b", 1.0, report(0))
    assert placement.uneven("m") == ("a", 3)
    placement.release("a", 0)
    assert placement.uneven("m") == ("", 0)


def test_no_more_leave_a_line_than_there_are_slots_elsewhere() -> None:
    placement = make_placement("a")
    ids = list(range(10))
    for request_id in ids:
        placement.assign("m", request_id)
    placement.add(ReplicaAddress("b", "m"), 0.0)
    for _ in range(2):
        placement.heard("a", 1.0, report(4, 6, ids))
        placement.heard("b", 1.0, report(0))
    assert placement.in_line("m") == [4, 5, 6, 7]
